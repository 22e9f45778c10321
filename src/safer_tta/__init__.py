"""Test-time adaptation that survives attacked inputs.

import safer_tta
adapted = safer_tta.adapt(model)       # Tent on SAFER-G; the model stays as it is
prediction = adapted(images)           # images (B,3,H,W) in [0,1]: predicts, then learns
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import (
        attacks,
        auditing,
        client,
        data,
        errors,
        evaluation,
        guards,
        methods,
        mixing,
        models,
        pooling,
        predictors,
        training,
        views,
    )
    from ._internal.malloc import keep_freed_memory
    from .api import adapt
    from .auditing import audit
    from .comparison import compare
    from .errors import SaferError
    from .gate import Gate
    from .guards import Guard
    from .methods import Method
    from .mixing import AdaptiveMixing, Mixing
    from .models import Classifier, load_classifier
    from .predictors import Defended, Plain, Prediction, Predictor, Safer

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [  # noqa: RUF022 - in groups
    # What users call.
    "Classifier", "Guard", "Method", "Prediction", "SaferError", "adapt", "audit", "compare", "keep_freed_memory",
    "load_classifier",
    # What is configured or extended.
    "AdaptiveMixing", "Defended", "Gate", "Mixing", "Plain", "Predictor", "Safer",
    # Rooms.
    "attacks", "auditing", "client", "data", "errors", "evaluation", "guards", "methods", "mixing", "models", "pooling",
    "predictors", "training", "views",
]  # fmt: skip

# Names are imported when they are asked for: `safer --help` need not wait for torch.
_HOMES = {"adapt": "api", "keep_freed_memory": "_internal.malloc", "SaferError": "errors", "Classifier": "models"}
_HOMES |= {
    "audit": "auditing",
    "compare": "comparison",
    "load_classifier": "models",
    "Gate": "gate",
    "Guard": "guards",
    "Method": "methods",
    "Mixing": "mixing",
    "AdaptiveMixing": "mixing",
}
_HOMES |= dict.fromkeys(("Defended", "Plain", "Prediction", "Predictor", "Safer"), "predictors")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
