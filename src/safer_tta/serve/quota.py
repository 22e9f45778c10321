"""How much room on disk an owner may take."""

import asyncio
import time
from collections import defaultdict

from starlette.concurrency import run_in_threadpool

from .journal import Journal
from .limits import MEGABYTE, Limits, Refused

KEPT = 10.0  # seconds for which a measurement is used
RARELY = 20  # times as long as it took, so that an owner with much on disk does not keep it busy


class Quota:
    """Refuses new streams of owners whose streams take too much room. Streams that exist go on."""

    def __init__(self, journal: Journal, limits: Limits) -> None:
        self.journal, self.limits = journal, limits
        self._measured: dict[str, tuple[int, float]] = {}  # bytes, and until when they are used
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def check(self, owner: str) -> None:
        async with self._locks[owner]:
            size, until = self._measured.get(owner, (0, 0.0))
            started = time.monotonic()
            if started >= until:
                size = await run_in_threadpool(self.journal.nbytes_of, owner)
                now = time.monotonic()
                kept = KEPT if size < self.limits.owner_disk_bytes else 0.0  # room may be made at any time
                self._measured[owner] = size, now + max(kept, RARELY * (now - started))
        if size >= self.limits.owner_disk_bytes:
            found, most = (f"{number / MEGABYTE:.0f} MB" for number in (size, self.limits.owner_disk_bytes))
            problem = f"your streams take {found}; expected at most {most}"
            raise Refused(507, f"{problem}. Delete some that are not used", reason="quota")
