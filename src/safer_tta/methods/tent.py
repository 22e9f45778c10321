"""Tent: minimise the entropy of the prediction by the scale and shift of the normalisation layers.

Wang et al., "Tent: Fully test-time adaptation by entropy minimization", ICLR 2021.
Objective: mean over the batch of H(p) = -Σ_k p_k log p_k. Batch statistics; the running ones are dropped.
"""

from __future__ import annotations

from torch import Tensor

from ..models.norm import use_batch_statistics
from ..predictors import Draw, Prediction, Predictor
from .base import Method
from .cost import Cost
from .losses import entropy
from .registry import register


@register("tent")
class Tent(Method):
    updates = "norm"
    cost = Cost(1, 1)
    repeats = True

    def __init__(self, predictor: Predictor, *, lr: float = 1e-3) -> None:
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())

    def forward(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor]:
        prediction = self.predictor.lesson(images, draw)
        return prediction, entropy(prediction.logits).mean()
