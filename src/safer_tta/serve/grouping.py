"""Batches of several streams that wait at the same time and take one step together."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from ..errors import InvalidValueError
from ..methods import Lockstep, Method, Snapshot, Taken
from .images import Pictures
from .turns import OfStream, Turns

log = logging.getLogger("safer_tta.serve")

CROWD = 64  # images of all streams in one step, at most: more of them gain little, and take more memory


class Batch(NamedTuple):
    """What a client sent: images, the key of the request if it has one, and a hash of the images."""

    images: Pictures
    key: str | None
    content: str


class Mode(NamedTuple):
    """How a batch is answered. Only batches of one mode are answered together."""

    frozen: bool
    learn: bool


class MayBeBatch(OfStream, Protocol):
    """Work for a stream, which may be a batch."""

    @property
    def batch(self) -> Batch | None: ...


J = TypeVar("J", bound=MayBeBatch)


class Together:
    """Takes a step for at most so many streams at once, if the method can do that."""

    def __init__(self, method: Method, side: int, streams: int) -> None:
        self.streams = streams
        self.lockstep = _lockstep(method, side) if streams > 1 else None

    def companions(self, first: J, jobs: Turns[J]) -> list[J]:
        """Take those jobs out of the queue that may join the first one, without waiting for any."""
        if self.lockstep is None or first.batch is None:
            return []
        shape = first.batch.images.shape
        most = min(self.streams, CROWD // shape[0]) - 1
        return jobs.take_more(lambda job: job.batch is not None and job.batch.images.shape == shape, most)

    def step(self, states: Sequence[Snapshot], batches: Sequence[Batch], mode: Mode) -> list[Taken]:
        assert self.lockstep is not None
        images = torch.stack([torch.from_numpy(batch.images) for batch in batches])
        return self.lockstep.step(states, images, learn=mode.learn and not mode.frozen)


def _lockstep(method: Method, side: int) -> Lockstep | None:
    """Return what takes steps for several streams; None, and a line in the log, if the method or model cannot."""
    try:
        made = Lockstep(method)
    except InvalidValueError as error:
        log.warning("streams take turns: %s", error)
        return None
    if not made.agrees(side):
        log.warning("streams take turns: the model gives other answers when batches of several streams pass at once")
        return None
    return made
