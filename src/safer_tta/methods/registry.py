"""Methods by name. A method is one file in this folder with one decorator; it is found by being there."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from ..models.classifier import Updates
from ..options import check
from ..predictors import Predictor
from ..registry import Registry
from .base import Method

METHODS: Registry[type[Method]] = Registry("method")

M = TypeVar("M", bound=type[Method])
CITATION = re.compile(r'([A-Z][^\n"]*?), "([^"]+)",\s+([^\n]*?\d{4})')


def register(name: str) -> Callable[[M], M]:
    """Make a Method known under a name."""

    def decorate(cls: M) -> M:
        if cls.updates not in get_args(Updates):
            raise ValueError(
                f"{cls.__name__}.updates is {cls.updates!r}; expected one of {', '.join(get_args(Updates))}"
            )
        METHODS[name] = cls
        cls.name = name
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
    defaults = {p.name: p.default for p in parameters if p.name != "predictor" and p.kind is not p.VAR_KEYWORD}
    return defaults | dict(options)


def describe(name: str) -> dict[str, str]:
    """A method's line in a list: what it is, whose it is, what it updates and costs."""
    cls = METHODS[name]
    # Of its own, where a file has several methods; else of its file.
    texts = [inspect.cleandoc(doc or "") for doc in (cls.__dict__.get("__doc__"), sys.modules[cls.__module__].__doc__)]
    text = next((doc for doc in texts if CITATION.search(doc)), texts[1] or texts[0])
    paper = CITATION.search(text)
    return {
        "updates": cls.updates,
        "cost": str(cls.cost),
        "what": text.partition("\n")[0],
        "paper": "" if paper is None else " ".join(f'{paper[1]}, "{paper[2]}", {paper[3]}'.split()),
    }
