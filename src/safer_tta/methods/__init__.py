"""Test-time adaptation methods, one file each. None of them knows which predictor it learns from."""

from ..rooms import import_all
from .base import Method
from .cost import Cost
from .registry import METHODS, create, describe, register

import_all(__name__, __path__)

__all__ = ["METHODS", "Cost", "Method", "create", "describe", "register"]
