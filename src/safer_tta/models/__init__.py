"""A classifier as features and head, its normalisation layers, a small zoo of networks, and models in files."""

from . import norm, zoo
from .classifier import Classifier
from .head import binary_head
from .importing import pack
from .packing import load_classifier
from .zero_shot import ZeroShot, zero_shot

__all__ = ["Classifier", "ZeroShot", "binary_head", "load_classifier", "norm", "pack", "zero_shot", "zoo"]
