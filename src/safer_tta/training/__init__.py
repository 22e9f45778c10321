"""Source models and the attacker's surrogate."""

from .source import robust, source_recipe, train_source
from .surrogate import THREAT, attacked_copies, full_threat, surrogate_recipe, train_surrogate
from .trainer import Recipe, load, train

__all__ = [
    "THREAT",
    "Recipe",
    "attacked_copies",
    "full_threat",
    "load",
    "robust",
    "source_recipe",
    "surrogate_recipe",
    "train",
    "train_source",
    "train_surrogate",
]
