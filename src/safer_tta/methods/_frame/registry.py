"""Methods by name. A method is one file in `methods/` with one decorator; it is known because it is there."""

import inspect
import re
import sys
from typing import Any, get_args

from ..._internal.checks import one_of
from ..._internal.registry import Registry
from ..._internal.signatures import check_options
from ...errors import InvalidTypeError
from ...models.classifier import Updates
from ...predictors import Predictor
from .method import Method

CITATION = re.compile(r'([A-Z][^\n"]*?), "([^"]+)",\s+([^\n]*?\d{4})')


def _named(name: str, cls: type[Method]) -> type[Method]:
    one_of(get_args(Updates), **{f"{cls.__name__}.updates": cls.updates})
    cls.name = name
    return cls


METHODS: Registry[type[Method]] = Registry("method", _named)
register = METHODS.register


def create(name: str, predictor: Predictor, **options: Any) -> Method:
    """Return a method by name around a predictor, whose classifier it adapts in place.

    `safer_tta.adapt` copies the model first.

    Args:
        name: A key of `METHODS`, such as "tent".
        predictor: What is asked for predictions.
        **options: The method's own, such as lr.

    Raises:
        UnknownNameError: If there is no method of this name.
        InvalidTypeError: If the method has no such option, or the predictor is none.
    """
    made = METHODS.find(name)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(
            f"predictor is {type(predictor).__name__}; expected one such as Plain(model) or Safer(model)"
        )
    check_options(made, options, name, own=["predictor"])
    return made(predictor, **options)


def describe(name: str) -> dict[str, str]:
    """Return a method's entry in a list: what it does, its paper, what it updates and costs."""
    cls = METHODS[name]
    # The class's docstring if it cites a paper, else its file's.
    texts = [inspect.cleandoc(doc or "") for doc in (cls.__dict__.get("__doc__"), sys.modules[cls.__module__].__doc__)]
    text = next((doc for doc in texts if CITATION.search(doc)), texts[1] or texts[0])
    paper = CITATION.search(text)
    return {
        "updates": cls.updates,
        "cost": str(cls.cost),
        "what": text.partition("\n")[0],
        "paper": "" if paper is None else " ".join(f'{paper[1]}, "{paper[2]}", {paper[3]}'.split()),
    }
