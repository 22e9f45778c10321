"""Clients that try wrong tokens are slowed down, each by its address, and mentioned in the log."""

import asyncio
import hashlib
import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

from .limits import Refused
from .shares import Share

log = logging.getLogger("safer_tta.serve")
K = TypeVar("K")
V = TypeVar("V")

FREE = 10  # wrong tokens of an address that cost nothing; one is forgotten every second
WAIT = 1.0  # seconds that further requests of that address wait before their token is looked at
WAITING = 32  # requests of an address that may wait so
REMEMBERED = 4096  # addresses, and right tokens
REPORTED = 5.0  # seconds that a line in the log is about


class Guesses:
    """Counts wrong tokens for each address.

    Other addresses never wait, nor does a token that was right at this address before. So somebody who tries tokens
    neither locks out the owners elsewhere nor those who already talk to the service through the same proxy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._wrong: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how many are remembered, and when
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()

    async def wait(self, address: str, header: str, place: Share) -> None:
        """Wait, if wrong tokens came from this address, before a token is looked at. Only waiting takes a place."""
        origin = network(address)
        if self._level(origin) < FREE or _known(origin, header) in self._right:
            return
        if self._waiting[origin] >= WAITING:
            problem = "too many wrong tokens came from your address"
            raise Refused(429, f"{problem}; try again in 1 s", retry_after=1, reason="token")
        place.resize(1)
        self._waiting[origin] += 1
        try:
            await asyncio.sleep(WAIT)
        finally:
            self._waiting -= Counter([origin])

    def right(self, address: str, header: str) -> None:
        _remember(self._right, _known(network(address), header), None)

    def wrong(self, address: str) -> None:
        place = network(address)
        _remember(self._wrong, place, (self._level(place) + 1, self.clock()))
        if not self._unreported:
            asyncio.get_running_loop().call_later(REPORTED, self._report)
        if len(self._unreported) < REMEMBERED or place in self._unreported:
            self._unreported[place] += 1

    def _level(self, place: str) -> float:
        level, when = self._wrong.get(place, (0.0, 0.0))
        return max(0.0, level - (self.clock() - when))

    def _report(self) -> None:
        """Write one line about all wrong tokens of the last seconds."""
        counts, self._unreported = self._unreported, Counter()
        most = ", ".join(f"{count} from {place}" for place, count in counts.most_common(3))
        places = f"{len(counts)} address{'es' if len(counts) > 1 else ''}"
        log.warning("%d requests with a wrong token from %s in %g s: %s", counts.total(), places, REPORTED, most)


def network(address: str) -> str:
    """Return the address, or the network of 2^64 addresses that one client of IPv6 usually has."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    except ValueError:
        return address


def _known(place: str, header: str) -> bytes:
    return hashlib.sha256(f"{place} {header}".encode()).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Remember a value as the newest one, and forget the oldest if there are too many."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
