"""Source models and the attacker's surrogate."""

from .source import SHIPPED, robust, source_recipe, train_source
from .surrogate import attacked_copies, surrogate_recipe, train_surrogate
from .trainer import Recipe, train

__all__ = [
    "SHIPPED",
    "Recipe",
    "attacked_copies",
    "robust",
    "source_recipe",
    "surrogate_recipe",
    "train",
    "train_source",
    "train_surrogate",
]
