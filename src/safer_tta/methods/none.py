"""No adaptation: the source model in eval mode (the paper's ERM row; with mean-pooled views, Static TTE)."""

from ..predictors import Outlook
from . import Cost, Method, register


@register("none")
class NoAdaptation(Method):
    updates = "none"
    cost = Cost(1, 0)

    def objective(self, seen: Outlook) -> None:
        return None
