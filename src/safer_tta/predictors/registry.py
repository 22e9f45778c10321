"""Predictors by name. A predictor is one file in this folder with one decorator; it is known because it is there."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .._internal.registry import Registry
from .._internal.signatures import check_options
from ..errors import InvalidTypeError
from ..models import Classifier
from .base import Predictor

PREDICTORS: Registry[Callable[..., Predictor]] = Registry("predictor")
register = PREDICTORS.register


def create(name: str, classifier: Classifier | nn.Module, *, seed: int | None = None, **options: Any) -> Predictor:
    """Return a predictor by name around a classifier.

    Args:
        name: A key of `PREDICTORS`, such as "plain", "safer" or "safer-g".
        classifier: The classifier that is asked; it is not copied.
        seed: Decides every draw. By default it is drawn from torch's own generator.
        **options: The predictor's own.

    Raises:
        UnknownNameError: If there is no predictor of this name.
        InvalidTypeError: If the predictor has no such option.
    """
    made = PREDICTORS.find(name)
    check_options(made, options, f"predictor {name!r}", own=["classifier", "seed", "transform"])
    return made(classifier, seed=seed, **options)


def parse(predictor: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a predictor given as a name, or as a dict {"name": ..., **options}."""
    if isinstance(predictor, str):
        return predictor, {}
    if isinstance(predictor, Mapping) and isinstance(predictor.get("name"), str):
        return predictor["name"], {key: value for key, value in predictor.items() if key != "name"}
    raise InvalidTypeError(
        f"predictor is {predictor!r}; expected a name, a dict with a name and options, or a Predictor. "
        f"Names: {', '.join(PREDICTORS)}"
    )
