"""Pseudo-Label: learn from one's own confident answers.

Lee, "Pseudo-Label: The simple and efficient semi-supervised learning method for deep neural networks", 2013.
Objective: cross-entropy to the argmax, over the images whose highest probability exceeds a threshold. All parameters
learn, batch-norm layers are in train mode. A batch without a confident image teaches nothing.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Draw, Prediction, Predictor
from .base import Method
from .cost import Cost
from .registry import register


@register("pl")
class PseudoLabel(Method):
    updates = "all"
    cost = Cost(1, 1)

    def __init__(self, predictor: Predictor, *, lr: float = 1e-4, threshold: float = 0.9) -> None:
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold is {threshold}; expected a probability in [0,1)")
        self.threshold = threshold
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())

    def forward(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor | None]:
        prediction = self.predictor.lesson(images, draw)
        confidence, label = prediction.probs.detach().max(dim=1)
        confident = confidence > self.threshold
        if not bool(confident.any()):
            return prediction, None
        return prediction, F.cross_entropy(prediction.logits[confident], label[confident])
