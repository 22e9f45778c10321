"""The model as it is: one image, one view."""

from torch import Tensor

from ..views import Draw
from .base import Outlook, Predictor, single_view
from .registry import register


@register("plain")
class Plain(Predictor):
    """Ask the model itself."""

    def show(self, images: Tensor, draw: Draw) -> Outlook:
        return single_view(self.classifier, images)
