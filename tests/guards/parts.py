"""Build guarded methods for the tests of guards."""

import torch
from torch import nn

import safer_tta
from safer_tta.guards import Guard
from tests.conftest import CLASSES, LEARNING, adapt_small

# Every state is healthy one batch later, and no answers are a collapse.
EVERY = {"window": 1, "snapshot_every": 1, "least_entropy": 0.0, "largest_share": 1.0}


class Colours(nn.Module):
    """Answers with the channel that is brightest; the brighter, the surer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, CLASSES, bias=False)
        self.fc.weight.data = torch.eye(CLASSES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(100 * x.mean(dim=(2, 3)))


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
