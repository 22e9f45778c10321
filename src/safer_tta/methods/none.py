"""No adaptation: the source model in eval mode (the paper's ERM row; with mean-pooled views, Static TTE)."""

from torch import Tensor

from ..predictors import Draw
from . import Cost, Method, Step, register


@register("none")
class NoAdaptation(Method):
    updates = "none"
    cost = Cost(1, 0)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        return Step(self.predictor.look(images, draw), None)
