"""Tent: minimise the entropy of the prediction by the scale and shift of the normalisation layers.

Wang et al., "Tent: Fully test-time adaptation by entropy minimization", ICLR 2021.
Objective: mean over the batch of H(p) = -Σ_k p_k log p_k. Batch statistics; the running ones are dropped.
"""

from torch import Tensor

from ..models.norm import use_batch_statistics
from ..predictors import Outlook
from . import Cost, Method, option, positive, register
from ._frame.losses import softmax_entropy


@register("tent")
class Tent(Method):
    updates = "norm"
    cost = Cost(1, 1)
    repeats = True
    lr: float = option(1e-3, positive)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())

    def objective(self, seen: Outlook) -> Tensor:
        return softmax_entropy(seen.lesson.logits).mean()
