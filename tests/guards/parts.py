"""Build guarded methods for the tests of guards."""

from __future__ import annotations

import torch

import safer_tta
from safer_tta.guards import Guard
from tests.conftest import LEARNING, small_net


def guarded(method="tent", predictor="plain", **options):
    adapted = safer_tta.adapt(small_net(), method, predictor, seed=0, validate=False)
    return Guard(adapted, **{"least_images": 1, **options})


def one_class() -> torch.Tensor:
    return torch.zeros(6, 3, 24, 24)


def quick(method: str, **options) -> Guard:
    """Any method under a guard, with as few passes a batch as it allows."""
    settings = {"memo": {"copies": 4}, "cotta": {"versions": 2}, **LEARNING}.get(method, {})
    return Guard(safer_tta.adapt(small_net(), method, "plain", seed=0, validate=False, **settings), **options)
