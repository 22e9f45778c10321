"""Methods by name. A method is one file in this folder with one decorator; it is found by being there."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..options import check
from ..predictors import Predictor
from .base import Method

METHODS: dict[str, type[Method]] = {}

M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Make a Method known under a name."""

    def decorate(cls: M) -> M:
        again = name in METHODS and METHODS[name].__qualname__ == cls.__qualname__ and cls.__module__ == "__main__"
        if name in METHODS and not again:  # a notebook's cell may be run twice
            raise ValueError(f"two methods are called {name!r}: {METHODS[name].__module__} and {cls.__module__}")
        cls.name = name
        METHODS[name] = cls
        return cls

    return decorate


def create(name: str, predictor: Predictor, **options: Any) -> Method:
    """A method around a predictor, whose classifier it adapts in place (`safer_tta.adapt` copies it first)."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(sorted(METHODS))}")
    if not isinstance(predictor, Predictor):
        raise TypeError(f"predictor is {type(predictor).__name__}; expected one such as Plain(model) or Safer(model)")
    check(METHODS[name], options, name, own=["predictor"])
    return METHODS[name](predictor, **options)


def settings(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a method, those not given at their defaults."""
    parameters = inspect.signature(METHODS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "predictor"} | dict(options)


def describe(name: str) -> dict[str, str]:
    """A method's line in a list: what it is, whose it is, what it updates and costs."""
    cls = METHODS[name]
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    paper = re.search(r'([A-Z][^\n"]*?), "([^"]+)",\s+([^\n]*?\d{4})', text)
    return {
        "updates": cls.updates,
        "cost": str(cls.cost),
        "what": text.partition("\n")[0],
        "paper": "" if paper is None else " ".join(f'{paper[1]}, "{paper[2]}", {paper[3]}'.split()),
    }
