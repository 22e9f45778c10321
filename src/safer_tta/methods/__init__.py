"""Test-time adaptation methods, one file each. None of them knows which predictor it learns from."""

from .._internal.autoload import import_all
from .._internal.checks import count, flag, not_negative, positive, share
from ._frame import (
    GENERATOR,
    METHODS,
    Closure,
    Cost,
    Evaluation,
    Method,
    Snapshot,
    Step,
    create,
    describe,
    evaluate,
    exclusive,
    learnt,
    option,
    register,
)

import_all(__name__, __path__)

__all__ = [
    "GENERATOR",
    "METHODS",
    "Closure",
    "Cost",
    "Evaluation",
    "Method",
    "Snapshot",
    "Step",
    "count",
    "create",
    "describe",
    "evaluate",
    "exclusive",
    "flag",
    "learnt",
    "not_negative",
    "option",
    "positive",
    "register",
    "share",
]
