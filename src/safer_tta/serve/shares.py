"""Shares of something scarce, such as memory, for owners who compete for it."""

import threading
from collections import Counter
from types import TracebackType

from .limits import Refused

GREED = 3  # how many times what stays free an owner may hold


class Shares:
    """What owners hold of a total. Nobody may hold more than three times what stays free.

    An owner alone may therefore hold three quarters of everything, and another one who comes then still finds room:
    three quarters of the rest. Nothing is set aside for owners who do not come.
    """

    def __init__(self, total: int, problem: str, reason: str) -> None:
        self.total, self.problem, self.reason = total, problem, reason
        self.held: Counter[str] = Counter()
        self.peak = 0  # of what all owners held together
        self._lock = threading.Lock()

    def change(self, owner: str, by: int) -> None:
        """Let an owner hold more or less, or refuse."""
        with self._lock:
            if by > 0 and self.held[owner] + by > GREED * (self.total - self.held.total() - by):
                raise Refused(429, f"{self.problem}; try again in 1 s", retry_after=1, reason=self.reason)
            self.held[owner] += by
            self.peak = max(self.peak, self.held.total())
            if not self.held[owner]:
                del self.held[owner]  # owners who hold nothing take no room here


class Share:
    """What one request holds; it is given back at the end of the block."""

    def __init__(self, shares: Shares, owner: str) -> None:
        self.shares, self.owner, self.size = shares, owner, 0

    def resize(self, size: int) -> None:
        """Hold so much from now on, or refuse and hold what was held before."""
        self.shares.change(self.owner, size - self.size)
        self.size = size

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.resize(0)
