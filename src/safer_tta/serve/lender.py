"""One version of the model in memory: its method is lent to one stream at a time.

A stream's state goes in before its batch and comes out after it. States that were not used for long are parked: they
are on disk already.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..guards import Guard
from ..methods import GENERATOR, Method, Snapshot, Taken
from ..predictors import Prediction
from .answers import Served
from .grouping import Batch, Mode, Together
from .journal import Journal, Stream
from .limits import Limits, Refused
from .sizes import adapted_bytes


@dataclass(frozen=True)
class Model:
    """A method that is ready to serve, and what is said about it."""

    method: Method
    served: Served
    file: str  # the name of the file that it comes from


class Lender:
    """Lends a method to streams, and keeps their states within a share of the memory."""

    def __init__(self, model: Model, journal: Journal, limits: Limits, seconds: float | None, models: int = 1) -> None:
        """`models` share the memory for states."""
        self.method, self.served, self.journal = model.method, model.served, journal
        self.version = model.served.version
        abstain = 0.0 if self.served.abstain is None else self.served.abstain  # None: there is no suspicion to compare
        # No anchor images: they would take more room than everything else of a stream.
        self.guard = Guard(self.method, least_agreement=0, seconds=seconds, abstain=abstain)
        self.memory_bytes, self.state_bytes = limits.memory_bytes // models, adapted_bytes(self.method)
        self.together = Together(self.method, self.served.side, limits.batch_streams)
        self.hot: OrderedDict[str, Stream] = OrderedDict()
        self._fresh = self.method.state_dict()
        self._resident = ""  # the stream whose state is in the method
        self._bytes: dict[str, int] = {}  # of each hot stream

    def start(self, seed: int) -> Snapshot:
        """Return the state of a stream before its first batch."""
        return {**self._fresh, GENERATOR: torch.Generator().manual_seed(seed).get_state()}

    def stream(self, identity: str) -> Stream:
        """Return a stream, read from disk if it is parked. It starts from the source model if it is new here."""
        stream = self.hot.get(identity)
        if stream is None:
            stream = self.journal.load(identity, self.method.state.check, version=self.version)
            if stream is None:
                raise refuse_missing()
            stream.state = stream.state or self.start(stream.seed)
            self.keep(stream)
        self.hot.move_to_end(identity)
        return stream

    def keep(self, stream: Stream) -> None:
        """Keep a stream in memory, and park those that have been idle longest."""
        self.hot[stream.id] = stream
        self._bytes[stream.id] = stream.nbytes
        total = sum(self._bytes.values())
        while len(self.hot) > 1 and total > self.memory_bytes:
            idle, _ = self.hot.popitem(last=False)
            total -= self._bytes.pop(idle, 0)

    def forget(self, identity: str) -> None:
        """Read a stream from disk when it is next used, as its tensors may be half changed."""
        self.hot.pop(identity, None)
        self._bytes.pop(identity, None)
        self._resident = ""

    def forget_all(self) -> None:
        self.hot.clear()
        self._bytes.clear()
        self._resident = ""

    def answer(self, stream: Stream, batch: Batch, mode: Mode) -> tuple[Prediction, float]:
        """Answer a batch of a stream; return the answer and the seconds in the model."""
        stream.frozen = mode.frozen
        self._put_in(stream)
        started = time.perf_counter()
        prediction = self.guard(torch.from_numpy(batch.images), learn=mode.learn)
        seconds = time.perf_counter() - started
        self._take_out(stream)
        return prediction, seconds

    def step(self, streams: Sequence[Stream], batches: Sequence[Batch], mode: Mode) -> list[Taken]:
        """Take one step for several streams at once, which `adopt` gives to each of them."""
        self._resident = ""
        return self.together.step([stream.state for stream in streams], batches, mode)

    def adopt(self, stream: Stream, batch: Batch, taken: Taken, mode: Mode, seconds: float) -> Prediction:
        images = torch.from_numpy(batch.images)
        prediction = self.guard.adopt(stream.memory, images, taken, **mode._asdict(), seconds=seconds)
        self._take_out(stream)
        return prediction

    def change(self, stream: Stream, what: str) -> None:
        """Freeze, unfreeze, reset or roll back a stream."""
        self._put_in(stream)
        if what == "freeze":
            self.guard.freeze()
        elif what == "unfreeze":
            self.guard.unfreeze()
        elif what == "rollback":
            self.guard.rollback(counted=False)
        else:
            self.guard.reset(seed=stream.seed)
        self._take_out(stream)

    def _put_in(self, stream: Stream) -> None:
        state = None if self._resident == stream.id else stream.state
        self._resident = ""
        self.guard.lend(stream.memory, frozen=stream.frozen, state=state)
        self._resident = stream.id

    def _take_out(self, stream: Stream) -> None:
        stream.state, stream.memory = self.guard.lent_state(), self.guard.memory
        stream.frozen, stream.last = self.guard.frozen, time.time()


def refuse_missing() -> Refused:
    return Refused(404, "the stream was deleted while this request waited; POST /v1/streams creates one")
