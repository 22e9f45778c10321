"""Where statistics follow the stream: whether a batch is learnt from, and by how long a step."""

import contextlib
from collections.abc import Iterator

from torch.optim import Optimizer

from ...models.statistics import StreamStatistics

PACE = 64  # images that a full step is made for


def diverse(statistics: StreamStatistics | None) -> bool:
    """Return whether the stream shows enough different images to learn from, as far as that is watched."""
    return statistics is None or bool(statistics.diverse())


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
