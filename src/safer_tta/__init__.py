"""Test-time adaptation that survives attacked inputs.

import safer_tta
adapted = safer_tta.adapt(model)       # SAFER around Tent; your model stays as it is
prediction = adapted(images)           # images (B,3,H,W) in [0,1]: predicts, then learns
"""

import logging

from . import attacks, guards, methods, mixing, models, pooling, predictors, views
from .api import adapt
from .methods import Method
from .mixing import Mixing
from .models import Classifier
from .predictors import Defended, Plain, Prediction, Predictor, Safer

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Classifier",
    "Defended",
    "Method",
    "Mixing",
    "Plain",
    "Prediction",
    "Predictor",
    "Safer",
    "adapt",
    "attacks",
    "guards",
    "methods",
    "mixing",
    "models",
    "pooling",
    "predictors",
    "views",
]
