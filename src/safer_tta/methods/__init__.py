"""Test-time adaptation methods, one file each. None of them knows which predictor it learns from."""

from .base import Method
from .registry import METHODS, create, describe, find_methods, register

find_methods(__name__, __path__)

__all__ = ["METHODS", "Method", "create", "describe", "register"]
