"""Source models and the attacker's surrogate."""

from .source import robust, train_source
from .surrogate import THREAT, attacked_copies, train_surrogate
from .trainer import Recipe, load, train

__all__ = ["THREAT", "Recipe", "attacked_copies", "load", "robust", "train", "train_source", "train_surrogate"]
