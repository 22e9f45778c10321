"""Test-time adaptation that survives attacked inputs.

import safer_tta
adapted = safer_tta.adapt(model)       # SAFER around Tent; your model stays as it is
prediction = adapted(images)           # images (B,3,H,W) in [0,1]: predicts, then learns
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import attacks, data, guards, methods, mixing, models, pooling, predictors, training, views
    from .allocator import keep_freed_memory
    from .api import adapt
    from .gate import Gate
    from .guards import Guard
    from .methods import Method
    from .mixing import Mixing
    from .models import Classifier
    from .predictors import Defended, Plain, Prediction, Predictor, Safer

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "Classifier",
    "Defended",
    "Gate",
    "Guard",
    "Method",
    "Mixing",
    "Plain",
    "Prediction",
    "Predictor",
    "Safer",
    "adapt",
    "attacks",
    "data",
    "guards",
    "keep_freed_memory",
    "methods",
    "mixing",
    "models",
    "pooling",
    "predictors",
    "training",
    "views",
]

# Names are fetched when they are asked for: `safer --help` need not wait for torch.
_HOMES = {"adapt": "api", "keep_freed_memory": "allocator"}
_HOMES |= {"Gate": "gate", "Guard": "guards", "Method": "methods", "Mixing": "mixing", "Classifier": "models"}
_HOMES |= dict.fromkeys(("Defended", "Plain", "Prediction", "Predictor", "Safer"), "predictors")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
