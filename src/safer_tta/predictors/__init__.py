"""Predictors turn images into the prediction a method learns from. One file each."""

from .._internal.autoload import import_all
from ..views import Draw
from .base import Outlook, Prediction, Predictor, Report, map_tensors, tensors_of
from .defended import TRANSFORMS, Defended
from .inputs import check_images, take_images
from .plain import Plain
from .registry import PREDICTORS, create, parse, register
from .safer import Safer

import_all(__name__, __path__)

__all__ = [
    "PREDICTORS",
    "TRANSFORMS",
    "Defended",
    "Draw",
    "Outlook",
    "Plain",
    "Prediction",
    "Predictor",
    "Report",
    "Safer",
    "check_images",
    "create",
    "map_tensors",
    "parse",
    "register",
    "take_images",
    "tensors_of",
]
