"""What every method stands on: the frame around a step, its state, and parts that several methods share."""

from ..._internal.locking import exclusive
from .cost import Cost
from .method import Closure, Method
from .options import option
from .registry import METHODS, create, describe, register
from .state import GENERATOR, Snapshot, State, learnt
from .step import Step
from .summary import Evaluation, evaluate

__all__ = [
    "GENERATOR",
    "METHODS",
    "Closure",
    "Cost",
    "Evaluation",
    "Method",
    "Snapshot",
    "State",
    "Step",
    "create",
    "describe",
    "evaluate",
    "exclusive",
    "learnt",
    "option",
    "register",
]
