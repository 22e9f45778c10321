"""Registries of named things of one kind. A name stands for one thing only, since results are kept under it."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import InvalidValueError, UnknownNameError

T = TypeVar("T")
F = TypeVar("F")


class Registry(dict[str, T], Generic[T]):
    """A dict that refuses a second thing under a name, and whose `register` is a decorator.

    `entry` makes an entry from a name, a thing and its traits. Error messages call an entry by `kind`.
    """

    def __init__(self, kind: str, entry: Callable[..., T] = lambda name, thing: thing) -> None:
        self.kind, self.entry = kind, entry

    def register(self, name: str, **traits: Any) -> Callable[[F], F]:
        """Return a decorator that registers a function or class under a name, with traits that its kind asks for."""

        def decorate(thing: F) -> F:
            self[name] = self.entry(name, thing, **traits)
            return thing

        return decorate

    def find(self, name: str) -> T:
        """Return the entry of this name, or raise an UnknownNameError."""
        if name not in self:
            raise UnknownNameError.of(self.kind, name, self)
        return self[name]

    def __setitem__(self, name: str, entry: T) -> None:
        if name in self and not _is_rerun_cell(self[name], entry):
            raise InvalidValueError(f"{self.kind} {name!r} exists already; choose another name")
        super().__setitem__(name, entry)


def _is_rerun_cell(known: object, entry: object) -> bool:
    """Whether both were defined under one name in a notebook or script, where a cell may be run twice."""
    first, second = (getattr(e, "function", e) for e in (known, entry))
    name = getattr(second, "__qualname__", None)
    return name is not None and second.__module__ == "__main__" and getattr(first, "__qualname__", None) == name
