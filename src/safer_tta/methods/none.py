"""No adaptation: the source model in eval mode (the paper's ERM row; with mean-pooled views, Static TTE)."""

from __future__ import annotations

from torch import Tensor

from ..predictors import Draw, Prediction, Predictor
from .base import Method
from .cost import Cost
from .registry import register


@register("none")
class NoAdaptation(Method):
    updates = "none"
    cost = Cost(1, 0)

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)

    def forward(self, images: Tensor, draw: Draw) -> tuple[Prediction, None]:
        return self.predictor(images, draw), None
