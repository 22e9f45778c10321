"""The work that waits for the engine: counted for each stream, and refused where there is no room for it."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from .limits import Limits, Refused
from .shares import GREED
from .turns import OfStream, Turns, owner_of

J = TypeVar("J", bound=OfStream)


class Room(Generic[J]):
    """A queue of limited length, for each stream and each owner too."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.jobs = limits, Turns[J](limits.queue)
        self.open = True
        self._waiting: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()  # batches that are being decoded, and will wait next
        self._pace = 0.1  # seconds that a job takes, from which the time in Retry-After follows
        self._lock = threading.RLock()

    @property
    def idle(self) -> bool:
        """Whether nothing waits, and more may come."""
        return self.open and not self.jobs.qsize()

    def check(self, stream: str) -> None:
        """Refuse more work; asked early too, before a body is read and decoded in vain."""
        with self._lock:
            if not self.open:
                raise refuse_stopped()
            waiting = self._waiting + self._coming
            if waiting[stream] >= self.limits.stream_queue:
                raise self._refuse(f"{waiting[stream]} batches of this stream are waiting, as many as may")
            free = self.limits.queue - self.jobs.qsize() - self._coming.total()
            if free <= 0:
                raise self._refuse(f"the queue of the service is full with {self.limits.queue} batches")
            owned = sum(n for name, n in waiting.items() if owner_of(name) == owner_of(stream))
            if owned >= min(self.limits.owner_queue, GREED * free):
                raise self._refuse(f"{owned} batches of this owner are waiting, as many as may")

    @contextlib.contextmanager
    def coming(self, stream: str) -> Iterator[None]:
        """Count a batch as waiting while it is decoded, or refuse it."""
        with self._lock:
            self.check(stream)
            self._coming[stream] += 1
        try:
            yield
        finally:
            with self._lock:
                self._coming -= Counter([stream])

    def put(self, job: J) -> None:
        """Let a job wait for its turn, or refuse it."""
        with self._lock:
            self.check(job.stream)
            self.jobs.put(job)
            self._waiting[job.stream] += 1

    def leave(self, job: J) -> None:
        """Give up the place of a job that is no longer wanted, unless its turn has come already."""
        if self.jobs.discard(job):
            self.done([job])

    def done(self, jobs: Sequence[J], seconds: float | None = None) -> None:
        """Count jobs as done, which took so long together."""
        with self._lock:
            self._waiting -= Counter(job.stream for job in jobs)  # which also drops streams with nothing left
            if seconds is not None:
                self._pace = 0.9 * self._pace + 0.1 * seconds / len(jobs)

    def crowded(self, stream: str) -> bool:
        """Whether so many batches of a stream wait that it is to answer them without learning."""
        return self._waiting[stream] > self.limits.behind

    def close(self) -> list[J]:
        """Accept nothing from now on; return what waited."""
        with self._lock:
            self.open = False
        return self.jobs.drain()

    def _refuse(self, why: str) -> Refused:
        wait = max(1.0, self.jobs.qsize() * self._pace)
        return Refused(429, f"{why}; try again in {wait:.0f} s", retry_after=wait, reason="queue")


def refuse_stopped() -> Refused:
    return Refused(503, "the service is stopping; try again later", retry_after=5, reason="stopping")
