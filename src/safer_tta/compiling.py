"""torch.compile, so that one program does not count against another."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T], *, tuned: bool = False) -> Callable[P, T]:
    """The function as a program for each shape it meets. The compiler counts programs by code object and silently gives
    up after eight; a code object of its own lets every model and every operator have its eight.

    tuned: try several layouts of each loop and keep the fastest; worth it for a model, whose program runs for long.
    """
    given: Any = function
    code = given.__code__.replace(co_name=f"{given.__name__}_compiled")
    own = types.FunctionType(code, given.__globals__, code.co_name, given.__defaults__, given.__closure__)
    return cast(Callable[P, T], torch.compile(own, dynamic=False, options={"max_autotune_pointwise": tuned}))
