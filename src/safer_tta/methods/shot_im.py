"""SHOT-IM: be certain about every image and diverse over the batch.

Liang et al., "Do we really need to access the source data? Source hypothesis transfer for unsupervised domain
adaptation", ICML 2020; its information-maximisation part, online.
Objective: mean H(p) - H(mean p). The featurizer learns, the head stays; batch-norm layers in train mode.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Prediction, Predictor
from .base import Method
from .cost import Cost
from .losses import entropy, marginal_entropy
from .registry import register


@register("shot_im")
class ShotIM(Method):
    updates = "features"
    cost = Cost(1, 1)
    repeats = True

    def __init__(self, predictor: Predictor, *, lr: float = 1e-4) -> None:
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor]:
        prediction = self.predictor.lesson(images, draw)
        return prediction, entropy(prediction.logits).mean() - marginal_entropy(prediction.logits)
