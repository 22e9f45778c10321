"""Let the functions of one object exclude each other, so that threads may share it."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Lockable(Protocol):
    def exclusively(self) -> AbstractContextManager[None]: ...


S = TypeVar("S", bound=Lockable)
P = ParamSpec("P")
T = TypeVar("T")


def exclusive(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a function of an object while no other thread uses the object."""

    @functools.wraps(function)
    def run(self: S, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.exclusively():
            return function(self, *arguments, **keywords)

    return run
