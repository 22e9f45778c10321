"""Options of methods, checked where they are given: a value that cannot work is refused by its name."""

from __future__ import annotations

import math


def positive(**values: float) -> None:
    """Finite numbers above zero: learning rates, radii."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a positive number")


def not_negative(**values: float) -> None:
    """Finite numbers from zero on: weights of penalties, limits."""
    for name, value in values.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a number from 0 on")


def share(**values: float) -> None:
    """Numbers from 0 to 1: momenta, probabilities, thresholds of confidence."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; expected a number from 0 to 1")


def count(**values: int) -> None:
    """Whole numbers from 1 on: capacities, copies, neighbours."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a whole number, at least 1")
