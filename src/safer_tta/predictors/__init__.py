"""Predictors: what turns images into the prediction a method learns from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..models import Classifier
from ..options import check
from ..registry import Registry
from ..views import Draw
from .base import Prediction, Predictor, Report, check_images
from .defended import TRANSFORMS, Defended
from .plain import Plain
from .safer import Safer

_SHIPPED: dict[str, Callable[..., Predictor]] = {
    "plain": Plain,
    **{name: functools.partial(Defended, transform=name) for name in TRANSFORMS},
    "safer": Safer,
    "safer-a": functools.partial(Safer, mixing="sigmoid"),
    "safer-gate": functools.partial(Safer, mixing="gate"),
}
PREDICTORS = Registry("predictor", _SHIPPED)


def create(name: str, classifier: Classifier | nn.Module, *, seed: int | None = None, **options: Any) -> Predictor:
    """A predictor by the name it has in result rows."""
    if name not in PREDICTORS:
        raise ValueError(f"predictor {name!r} is unknown; expected one of {', '.join(PREDICTORS)}")
    check(PREDICTORS[name], options, name, own=["classifier", "seed", "transform"])
    return PREDICTORS[name](classifier, seed=seed, **options)


__all__ = [
    "PREDICTORS",
    "TRANSFORMS",
    "Defended",
    "Draw",
    "Plain",
    "Prediction",
    "Predictor",
    "Report",
    "Safer",
    "check_images",
    "create",
]
