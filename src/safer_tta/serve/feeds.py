"""Who follows the reports of a stream."""

import logging
import threading
from collections.abc import Callable

from .journal import Json
from .limits import Limits, Refused
from .turns import owner_of

log = logging.getLogger("safer_tta.serve")

Listener = Callable[[Json | None], object]


class Feeds:
    """Passes the reports of streams to those who listen."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.feeds
        self._listeners: dict[str, set[Listener]] = {}
        self._lock = threading.Lock()

    def listen(self, stream: str, listener: Listener) -> Callable[[], None]:
        """Call a listener with every report of a stream, and with None at the end; return a function that stops it."""
        with self._lock:
            feeds = sum(len(them) for name, them in self._listeners.items() if owner_of(name) == owner_of(stream))
            if feeds >= self._most:
                problem = f"{feeds} feeds of this owner are open; expected at most {self._most}"
                raise Refused(429, f"{problem}. Close some", retry_after=5, reason="feeds")
            self._listeners.setdefault(stream, set()).add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.get(stream, set()).discard(listener)
                if not self._listeners.get(stream):
                    self._listeners.pop(stream, None)

        return stop

    def tell(self, stream: str, report: Json | None) -> None:
        """Pass a report on; None ends the feeds of the stream."""
        with self._lock:
            listeners = list(self._listeners.get(stream, ()))
        for listener in listeners:
            try:
                listener(report)
            except Exception:  # the listener has gone away; the batch is answered all the same
                log.debug("a listener is gone", exc_info=True)

    def end(self) -> None:
        """End all feeds."""
        with self._lock:
            streams = list(self._listeners)
        for stream in streams:
            self.tell(stream, None)
