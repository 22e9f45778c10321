"""The model as it is: one image, one view."""

from __future__ import annotations

from torch import Tensor

from ..views import Draw
from .base import Prediction, Predictor, single_view


class Plain(Predictor):
    def predict(self, images: Tensor, draw: Draw) -> Prediction:
        return single_view(self.classifier, images)
