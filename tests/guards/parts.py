"""Build guarded methods for the tests of guards."""

import torch

import safer_tta
from safer_tta.guards import Guard
from tests.conftest import LEARNING, adapt_small

# Every state is healthy one batch later, and no answers are a collapse.
EVERY = {"window": 1, "snapshot_every": 1, "least_entropy": 0.0, "largest_share": 1.0}


def guarded(method="tent", predictor="plain", **options) -> Guard:
    return Guard(adapt_small(method, predictor, validate=False), **{"least_images": 1, **options})


def states_after(guard: Guard, stream: list[torch.Tensor]) -> list[safer_tta.methods.Snapshot]:
    """Return the state after every batch of a stream."""
    return [guard(images) and guard.state_dict() for images in stream]


def one_class() -> torch.Tensor:
    return torch.zeros(6, 3, 24, 24)


def quick(method: str, **options) -> Guard:
    """Any method under a guard, with as few passes a batch as it allows."""
    settings = {"memo": {"copies": 4}, "cotta": {"versions": 2}, **LEARNING}.get(method, {})
    return Guard(adapt_small(method, validate=False, **settings), **options)
