"""Checks of values. An error names the option, what came and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, UnknownNameError


def positive(**values: Any) -> None:
    """Accept finite numbers above zero, such as learning rates and radii."""
    for name, value in values.items():
        _check_number(name, value, "a positive number")
        if not (value > 0 and math.isfinite(value)):
            raise InvalidValueError(f"{name} is {value}; expected a positive number")


def not_negative(**values: Any) -> None:
    """Accept finite numbers that are zero or more, such as weights of penalties."""
    for name, value in values.items():
        _check_number(name, value, "a number of at least 0")
        if not (value >= 0 and math.isfinite(value)):
            raise InvalidValueError(f"{name} is {value}; expected a number of at least 0")


def share(**values: Any) -> None:
    """Accept numbers from 0 to 1, such as momenta, probabilities and thresholds of confidence."""
    for name, value in values.items():
        _check_number(name, value, "a number from 0 to 1")
        if not 0 <= value <= 1:
            raise InvalidValueError(f"{name} is {value}; expected a number from 0 to 1")


def count(**values: Any) -> None:
    """Accept whole numbers of at least 1, such as capacities, copies and neighbours."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidTypeError(f"{name} is {value!r}; expected a whole number of at least 1")
        if value < 1:
            raise InvalidValueError(f"{name} is {value}; expected a whole number of at least 1")


def flag(**values: Any) -> None:
    """Accept True and False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"{name} is {value!r}; expected True or False")


def one_of(known: Iterable[str], **values: Any) -> None:
    """Accept one of some words."""
    for name, value in values.items():
        if value not in (names := list(known)):
            raise UnknownNameError.of(name, value, names)


def _check_number(name: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise InvalidTypeError(f"{name} is {value!r}; expected {expected}")
