"""A classifier as features and head, its normalisation layers, and a small zoo of networks."""

from . import norm, zoo
from .classifier import Classifier
from .head import binary_head
from .zero_shot import ZeroShot, zero_shot

__all__ = ["Classifier", "ZeroShot", "binary_head", "norm", "zero_shot", "zoo"]
