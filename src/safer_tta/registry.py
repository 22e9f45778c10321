"""Things of one kind by name: methods, operators, rules. A name stands for one thing, as results are kept under it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """A dict that knows what it holds, and refuses a second thing of a name."""

    def __init__(self, kind: str, known: Mapping[str, T] | None = None) -> None:
        super().__init__(known or {})
        self.kind = kind

    def __setitem__(self, name: str, thing: T) -> None:
        if name in self and not _again(self[name], thing):
            raise ValueError(f"another {self.kind} is called {name!r} already; choose another name")
        super().__setitem__(name, thing)


def _again(known: object, thing: object) -> bool:
    """Whether a notebook's cell was run twice."""
    where = ("__main__", getattr(thing, "__qualname__", None))
    return where[1] is not None and where == (thing.__module__, getattr(known, "__qualname__", None))
