"""T3A: replace the head by prototypes of the features the model was surest about. Nothing is trained.

Iwasawa and Matsuo, "Test-time classifier adjustment module for model-agnostic domain generalization", NeurIPS 2021.
Prediction: z · (unit-norm prototypes), with the batch at hand among the supports. The model is in eval mode.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..predictors import Prediction, Predictor
from . import supports
from .base import Method
from .checks import count
from .cost import Cost
from .registry import register


@register("t3a")
class T3A(Method):
    updates = "none"
    cost = Cost(1, 0)
    by_predictor = False

    def __init__(self, predictor: Predictor, *, keep: int = 100) -> None:
        count(keep=keep)
        self.keep = keep
        super().__init__(predictor)

    def prepare(self) -> None:
        self.state.memory.update(supports.from_head(self.classifier.head))

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, None]:
        prediction = self.predictor.lesson(images, draw)
        memory = supports.extended(self.state.memory, prediction, self.keep)
        prototypes = F.normalize(supports.prototypes(memory, self.classifier.num_classes), dim=1)
        logits = prediction.features @ prototypes.T
        return dataclasses.replace(prediction.saying(logits), kept=memory), None

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        self.state.memory.update(prediction.kept)
