"""How much work a service accepts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

MEGABYTE = 2**20


class Refused(HTTPException):
    """A request is refused, with a status and words; the reason is one word for the metrics."""

    def __init__(
        self, status: int, message: str, *, retry_after: float | None = None, reason: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.retry_after, self.reason = status, message, retry_after, reason


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service accepts; it refuses more."""

    images: int = 256  # of a batch
    pixels: int = 16_000_000  # of an image
    batch_pixels: int = 256_000_000
    body_bytes: int = 64 * MEGABYTE  # of a batch as it arrives
    json_bytes: int = 64 * 1024  # of any other request
    upload_bytes: int = 1024 * MEGABYTE  # of all bodies and decoded images until they are answered, shared by owners
    body_s: float = 20.0  # until a body has arrived, and longer by its bytes over `body_rate`
    body_rate: int = 64 * 1024  # bytes a second
    requests: int = 1024  # that are answered at once, shared by owners
    connections: int = 4096  # open ones; beyond them the longest idle one is closed
    headers_s: float = 10.0  # until the headers of a request have arrived
    idle_s: float = 30.0  # until a connection without a further request is closed
    answer_s: float = 60.0  # for which a client may take nothing of an answer
    queue: int = 256  # batches that may wait in all
    owner_queue: int = 128  # batches of one owner that may wait
    wait_s: float = 50.0  # that a batch may wait; then it is refused, since its client may have given up
    decoding: int = 16  # batches of one owner that are decoded or wait for it
    stream_queue: int = 16  # batches of one stream that may wait
    behind: int = 8  # with more of its own batches waiting, a stream is answered without learning
    batch_streams: int = 1  # whose waiting batches take one step together; 1 lets every stream take its turn
    memory_bytes: int = 1024 * MEGABYTE  # adapted states in memory; the others are parked on disk
    shadow_queue: int = 256  # batches that wait for the shadow of a roll-out; beyond them the oldest is left out
    shadow_bytes: int = 256 * MEGABYTE  # of these batches
    disk_bytes: int = 64 * 1024 * MEGABYTE  # of the journal, beyond which no stream is created
    owner_streams: int = 1000  # of one owner
    owner_disk_bytes: int = 16 * 1024 * MEGABYTE  # of an owner's streams, beyond which that owner creates none
    requests_per_s: float = 200.0  # of one owner; twice as many may come at once
    feeds: int = 64  # of one owner


class RateLimit:
    """A token bucket for every owner, which fills at a steady pace and holds two seconds' worth."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.clock = per_second, clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # (left, when)

    def take(self, owner: str) -> None:
        """Take a token of this owner, or refuse."""
        with self._lock:
            now, full = self.clock(), 2 * self.per_second
            left, when = self._buckets.get(owner, (full, now))
            left = min(full, left + (now - when) * self.per_second)
            if left < 1:
                wait = (1 - left) / self.per_second
                problem = f"more than {self.per_second:g} requests a second"
                raise Refused(429, f"{problem}; try again later", retry_after=wait, reason="rate")
            self._buckets[owner] = (left - 1, now)
