"""The model as it is: one image, one view."""

from .base import Predictor
from .registry import register


@register("plain")
class Plain(Predictor):
    """Ask the model itself."""
