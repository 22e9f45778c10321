"""Checks of values. An error names the option, what came and what was expected."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, UnknownNameError


def positive(**values: Any) -> None:
    """Accept finite numbers above zero, such as learning rates and radii."""
    _check_numbers(values, "a positive number", lambda value: 0 < value < math.inf)


def not_negative(**values: Any) -> None:
    """Accept finite numbers that are zero or more, such as weights of penalties."""
    _check_numbers(values, "a number of at least 0", lambda value: 0 <= value < math.inf)


def share(**values: Any) -> None:
    """Accept numbers from 0 to 1, such as momenta, probabilities and thresholds of confidence."""
    _check_numbers(values, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def count(**values: Any) -> None:
    """Accept whole numbers of at least 1, such as capacities, copies and neighbours."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidTypeError(f"{name} is {value!r}; expected a whole number of at least 1")
        if value < 1:
            raise InvalidValueError(f"{name} is {value}; expected a whole number of at least 1")


def whole(**values: Any) -> None:
    """Accept whole numbers, such as seeds."""
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidTypeError(f"{name} is {value!r}; expected a whole number{_unquoted(name, value)}")


def flag(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"{name} is {value!r}; expected True or False")


def one_of(known: Iterable[str], **values: Any) -> None:
    names = list(known)
    for name, value in values.items():
        if value not in names:
            raise UnknownNameError.of(name, value, names)


def _check_numbers(values: Mapping[str, Any], expected: str, accepted: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise InvalidTypeError(f"{name} is {value!r}; expected {expected}{_unquoted(name, value)}")
        if not accepted(value):
            raise InvalidValueError(f"{name} is {value}; expected {expected}")


def _unquoted(name: str, value: Any) -> str:
    """Return advice on a number that came as a string, as configuration files often give it."""
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(value, str):
            number = float(value)
            return f". It is a string; give the number: {name}={int(number) if number.is_integer() else number!r}"
    return ""
