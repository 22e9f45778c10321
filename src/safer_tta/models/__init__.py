"""Any nn.Module as features and head, its normalisation layers, and a small zoo."""

from . import norm, zoo
from .classifier import Classifier

__all__ = ["Classifier", "norm", "zoo"]
