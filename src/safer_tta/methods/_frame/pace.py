"""How far a batch is learnt from where statistics follow the stream: by its size."""

import contextlib
from collections.abc import Iterator

from torch.optim import Optimizer

from ...models.statistics import StreamStatistics

PACE = 64  # images that a full step is made for


@contextlib.contextmanager
def paced(optimizer: Optimizer | None, statistics: StreamStatistics | None, images: int) -> Iterator[None]:
    """Inside, a step is as long as a batch is large, so that many small batches teach what a large one does."""
    if statistics is None or optimizer is None or images >= PACE:
        yield
        return
    groups = optimizer.param_groups
    lengths = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = group["lr"] * images / PACE
        yield
    finally:
        for group, length in zip(groups, lengths, strict=True):
            group["lr"] = length
