"""How much a service takes on, and how it says no."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException

MEGABYTE = 2**20


class Refused(HTTPException):
    """A request that is answered with a status and a reason."""

    def __init__(self, status: int, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(status, message)
        self.status, self.message, self.retry_after = status, message, retry_after


@dataclass(frozen=True, kw_only=True)
class Limits:
    """images: of a batch. pixels, batch_pixels: of an image and of a batch, before anything is decoded. body_bytes: of
    a batch as it arrives; json_bytes: of any other request; upload_bytes: of all that are arriving at once.
    queue, owner_queue, stream_queue: batches that may wait, in all, of one owner and of one stream; with more than
    `behind` of its own waiting a stream is answered without learning. decoding: batches decoded or waiting for it.
    memory_bytes: adapted states kept in memory; the others are parked on disk. disk_bytes: of the journal, beyond
    which no stream is created; those that are there go on.
    requests_per_s: of one owner, twice as many at once. feeds: of one owner.
    """

    images: int = 256
    pixels: int = 16_000_000
    batch_pixels: int = 256_000_000
    body_bytes: int = 64 * MEGABYTE
    json_bytes: int = 64 * 1024
    upload_bytes: int = 512 * MEGABYTE
    queue: int = 256
    owner_queue: int = 128
    decoding: int = 16
    stream_queue: int = 16
    behind: int = 8
    memory_bytes: int = 1024 * MEGABYTE
    disk_bytes: int = 64 * 1024 * MEGABYTE
    requests_per_s: float = 200.0
    feeds: int = 64


class RateLimit:
    """A bucket for every owner that fills at a steady pace and holds two seconds' worth."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.clock = per_second, clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # (left, when)

    def take(self, owner: str) -> None:
        with self._lock:
            now, full = self.clock(), 2 * self.per_second
            left, when = self._buckets.get(owner, (full, now))
            left = min(full, left + (now - when) * self.per_second)
            if left < 1:
                wait = (1 - left) / self.per_second
                raise Refused(
                    429, f"more than {self.per_second:g} requests a second; try again later", retry_after=wait
                )
            self._buckets[owner] = (left - 1, now)
