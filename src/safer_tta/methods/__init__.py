"""Test-time adaptation methods, one file each. None of them knows which predictor it learns from."""

from .._internal.autoload import import_all
from .._internal.checks import count, flag, not_negative, positive, share
from ._frame.closing import Closure
from ._frame.cost import Cost
from ._frame.lockstep import Lockstep, Taken
from ._frame.method import Method
from ._frame.options import option
from ._frame.registry import METHODS, create, describe, register
from ._frame.state import GENERATOR, Snapshot, learnt, moved
from ._frame.step import Step

import_all(__name__, __path__)

__all__ = [
    "GENERATOR",
    "METHODS",
    "Closure",
    "Cost",
    "Lockstep",
    "Method",
    "Snapshot",
    "Step",
    "Taken",
    "count",
    "create",
    "describe",
    "flag",
    "learnt",
    "moved",
    "not_negative",
    "option",
    "positive",
    "register",
    "share",
]
