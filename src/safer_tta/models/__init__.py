"""A classifier as features and head, its normalisation layers, a small zoo of networks, and models in files."""

from . import norm, zoo
from .classifier import Classifier
from .importing import pack
from .packing import load_classifier

__all__ = ["Classifier", "load_classifier", "norm", "pack", "zoo"]
