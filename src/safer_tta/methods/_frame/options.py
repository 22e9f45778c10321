"""Options of a method, declared once: the default value, how values are checked, and the settings of a run.

class Tent(Method):
    lr: float = option(1e-3, positive)
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")
Check = Callable[..., None]  # called with one keyword argument, the option's name and value


class Option:
    """A declared option: on the class it is its declaration, on an instance its checked value."""

    def __init__(self, default: Any, checks: tuple[Check, ...]) -> None:
        self.default, self.checks = default, checks

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        return self if instance is None else vars(instance)[self.name]

    def __set__(self, instance: object, value: Any) -> None:
        for check in self.checks:
            check(**{self.name: value})
        vars(instance)[self.name] = value


def option(default: T, *checks: Check) -> T:
    """Declare an option of a method in its class body, with its default and the checks of its values."""
    return cast(T, Option(default, checks))


def declared(cls: type) -> dict[str, Option]:
    """Return the options of a method's class, those of its bases first. A plain value in a subclass takes one away."""
    found: dict[str, Option] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Option):
                found[name] = value
            else:
                found.pop(name, None)
    return found


def signature(cls: type) -> inspect.Signature:
    """Return how a method's class is called: with a predictor, and its options by keyword."""
    kinds = inspect.Parameter
    options = [
        kinds(name, kinds.KEYWORD_ONLY, default=option.default, annotation=_annotation(cls, name))
        for name, option in declared(cls).items()
    ]
    return inspect.Signature([kinds("predictor", kinds.POSITIONAL_OR_KEYWORD, annotation="Predictor"), *options])


def _annotation(cls: type, name: str) -> Any:
    return next(base.__annotations__[name] for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
