"""BN: normalise with the statistics of the test batch; nothing is learnt.

Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation", NeurIPS 2020;
Nado et al., "Evaluating prediction-time batch normalization for robustness under covariate shift", 2020.
"""

from __future__ import annotations

from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Draw, Prediction, Predictor
from .base import Method
from .registry import register


@register("bn")
class BatchStatistics(Method):
    updates = "none"
    cost = "1 forward, 0 backward"

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())

    def forward(self, images: Tensor, draw: Draw) -> tuple[Prediction, None]:
        return self.predictor(images, draw), None
