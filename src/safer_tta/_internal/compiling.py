"""Compile functions separately, each with torch.compile's full number of recompilations."""

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def compile_function(function: Callable[P, T], *, tuned: bool = False) -> Callable[P, T]:
    """Compile a function anew for every shape.

    The compiler gives up silently after eight programs of one code object, so every function gets a code object of its
    own. `tuned` tries several layouts of each loop, which pays for models.
    """
    given: Any = function
    code = given.__code__.replace(co_name=f"{given.__name__}_compiled")
    own = types.FunctionType(code, given.__globals__, code.co_name, given.__defaults__, given.__closure__)
    return cast(Callable[P, T], torch.compile(own, dynamic=False, options={"max_autotune_pointwise": tuned}))
