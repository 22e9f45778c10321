"""Work that waits, in turns over owners, so that no owner waits for all the work of another one."""

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class OfStream(Protocol):
    """Work for one stream."""

    @property
    def stream(self) -> str:
        """Return OWNER/NAME."""


J = TypeVar("J", bound=OfStream)


class Turns(Generic[J]):
    """A queue in which owners take turns, and the streams of an owner, too. The jobs of a stream keep their order.

    It is the turn of the owner who was served longest ago. An owner who comes to a long queue is therefore the next
    one, unless others were served longer ago.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._owners: dict[str, OrderedDict[str, deque[J]]] = {}  # the stream whose turn it is comes first
        self._served: dict[str, int] = {}  # the number of each owner's last turn; owners are those who have tokens
        self._size, self._turn, self._closed = 0, 0, False
        self._taken: set[str] = set()  # streams of the last job and of those that joined it
        self._changed = threading.Condition()

    def qsize(self) -> int:
        return self._size

    def full(self) -> bool:
        return self.most is not None and self._size >= self.most

    def put(self, job: J) -> None:
        """Append a job, or raise `queue.Full`."""
        with self._changed:
            if self.full():
                raise queue.Full
            streams = self._owners.setdefault(owner_of(job.stream), OrderedDict())
            streams.setdefault(job.stream, deque()).append(job)
            self._size += 1
            self._changed.notify()

    def get(self) -> J | None:
        """Wait for the next job and return it; return None once the queue is closed and empty."""
        with self._changed:
            while not self._size:
                if self._closed:
                    return None
                self._changed.wait()
            first = next(self._in_turn())
            self._taken = {first}
            return self._take(first)

    def take_more(self, accepts: Callable[[J], bool], most: int) -> list[J]:
        """Return up to `most` further jobs that may join the last one, without waiting.

        They are the first jobs of other streams, and at most one of each. Owners take turns here, too.
        """
        found: list[J] = []
        with self._changed:
            for stream in list(self._in_turn()):
                if len(found) >= most:
                    break
                job = self._owners[owner_of(stream)][stream][0]
                if stream not in self._taken and accepts(job):
                    self._taken.add(stream)
                    found.append(self._take(stream))
        return found

    def discard(self, job: J) -> bool:
        """Take out a job that is no longer wanted; return whether it was still waiting."""
        with self._changed:
            jobs = self._owners.get(owner_of(job.stream), OrderedDict()).get(job.stream, deque())
            if not any(job is waiting for waiting in jobs):
                return False
            left = [waiting for waiting in jobs if waiting is not job]
            jobs.clear()
            jobs.extend(left)
            self._drop(job.stream)
            return True

    def drain(self) -> list[J]:
        """Return all jobs that wait, and forget them."""
        with self._changed:
            jobs = [job for streams in self._owners.values() for waiting in streams.values() for job in waiting]
            self._owners.clear()
            self._size = 0
            return jobs

    def close(self) -> None:
        """Let `get` end, once nothing waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _in_turn(self) -> Iterator[str]:
        """Yield all streams in the order in which they would be served, if each had one job."""
        owners = sorted(self._owners, key=lambda owner: self._served.get(owner, 0))
        rounds = [iter(self._owners[owner]) for owner in owners]
        while rounds:
            left = []
            for streams in rounds:
                stream = next(streams, None)
                if stream is not None:
                    yield stream
                    left.append(streams)
            rounds = left

    def _take(self, stream: str) -> J:
        """Take the first job of a stream, and let its owner and the stream wait for their next turns."""
        owner = owner_of(stream)
        streams = self._owners[owner]
        job = streams[stream].popleft()
        streams.move_to_end(stream)
        self._turn += 1
        self._served[owner] = self._turn
        self._drop(stream)
        return job

    def _drop(self, stream: str) -> None:
        """Count one job less, and forget a stream and an owner that have none left."""
        owner = owner_of(stream)
        self._size -= 1
        if not self._owners[owner][stream]:
            del self._owners[owner][stream]
        if not self._owners[owner]:
            del self._owners[owner]


def owner_of(stream: str) -> str:
    """Return the owner of a stream OWNER/NAME."""
    return stream.partition("/")[0]
