"""SHOT-IM: be certain about every image and diverse over the batch.

Liang et al., "Do we really need to access the source data? Source hypothesis transfer for unsupervised domain
adaptation", ICML 2020; its information-maximisation part, online.
Objective: mean H(p) - H(mean p). The featurizer learns, the head stays; batch-norm layers in train mode.
"""

from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Outlook
from . import Cost, Method, option, positive, register
from ._frame.losses import marginal_entropy, softmax_entropy


@register("shot_im")
class ShotIM(Method):
    updates = "features"
    cost = Cost(1, 1)
    repeats = True
    lr: float = option(1e-4, positive)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())

    def objective(self, seen: Outlook) -> Tensor:
        logits = seen.lesson.logits
        return softmax_entropy(logits).mean() - marginal_entropy(logits)
