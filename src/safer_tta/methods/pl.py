"""Pseudo-Label: learn from one's own confident answers.

Lee, "Pseudo-Label: The simple and efficient semi-supervised learning method for deep neural networks", 2013.
Objective: cross-entropy to the argmax, over the images whose highest probability exceeds a threshold. All parameters
learn, batch-norm layers are in train mode. A batch without a confident image teaches nothing.
"""

import torch.nn.functional as F
from torch import Tensor

from ..errors import InvalidValueError
from ..models.norm import use_train_mode
from ..predictors import Draw
from . import Cost, Method, Step, option, positive, register, share


def _reachable(threshold: float) -> None:
    """Refuse a threshold that no probability exceeds."""
    if threshold == 1:
        raise InvalidValueError("threshold is 1, which no probability exceeds; expected a number below 1")


@register("pl")
class PseudoLabel(Method):
    updates = "all"
    cost = Cost(1, 1)
    lr: float = option(1e-4, positive)
    threshold: float = option(0.9, share, _reachable)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        confidence, label = seen.lesson.probs.detach().max(dim=1)
        confident = confidence > self.threshold
        if not bool(confident.any()):
            return Step(seen, None)
        return Step(seen, F.cross_entropy(seen.lesson.logits[confident], label[confident]))
