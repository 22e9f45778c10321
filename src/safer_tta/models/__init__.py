"""A classifier as features and head, its normalisation layers, and a small zoo of networks."""

from . import norm, zoo
from .classifier import Classifier

__all__ = ["Classifier", "norm", "zoo"]
