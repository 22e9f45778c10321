"""The shadow of a roll-out: another model that sees the same batches, and whose answers are only compared.

Nothing that goes wrong here reaches a client. It is counted, and the log says it.
"""

import contextlib
import logging
import threading
from collections import Counter, deque
from typing import NamedTuple

from ..errors import InvalidValueError, JournalError, SaferError
from ..guards import flags
from .answers import Served
from .comparison import compare
from .grouping import Batch, Mode
from .journal import Journal, Json
from .lender import Lender
from .limits import Limits, Refused
from .metrics import Metrics

log = logging.getLogger("safer_tta.serve")


class Seen(NamedTuple):
    """A batch as it was answered."""

    stream: str
    number: int
    batch: Batch
    mode: Mode
    labels: list[int]
    flagged: int
    seconds: float


class Shadow:
    """Answers batches that were answered already. All but `describe` is called on the engine's thread."""

    def __init__(self, lender: Lender, journal: Journal, limits: Limits, metrics: Metrics) -> None:
        self.lender, self.journal, self.limits, self.metrics = lender, journal, limits, metrics
        self._waiting: deque[Seen] = deque()
        self._bytes = 0  # of the images that wait
        self._uncounted: Counter[str] = Counter()  # what the journal is told with the next batch
        self._lock = threading.Lock()  # what is not counted yet and what is on disk change together
        self._said = ""  # the last failure in the log

    def offer(self, seen: Seen) -> None:
        """Let a batch wait. If too much waits, the oldest batches are left out."""
        self._waiting.append(seen)
        self._bytes += seen.batch.images.nbytes
        while len(self._waiting) > self.limits.shadow_queue or self._bytes > self.limits.shadow_bytes:
            self._bytes -= self._waiting.popleft().batch.images.nbytes
            self._lose("missed")

    def work(self) -> bool:
        """Answer the batch that has waited longest, and compare; return whether there was one."""
        if not self._waiting:
            return False
        seen = self._waiting.popleft()
        self._bytes -= seen.batch.images.nbytes
        try:
            self._answer(seen)
        except Exception as error:
            self.lender.forget(seen.stream)
            self._say(seen.stream, error)
            self._lose("failed")
        return True

    def forget(self, identity: str) -> None:
        """Forget a stream whose states are gone, with the batches of it that wait."""
        self.lender.forget(identity)
        left = [seen for seen in self._waiting if seen.stream != identity]
        self._lose("missed", len(self._waiting) - len(left))
        self._waiting, self._bytes = deque(left), sum(seen.batch.images.nbytes for seen in left)

    def switch(self, other: Lender, owner: str) -> None:
        """Let this model answer from now on, on disk too; the other one is the shadow then."""
        lost = len(self._waiting)
        with self._lock:
            self.journal.switch(owner, {**self._uncounted, "missed": self._uncounted["missed"] + lost})
            self._uncounted.clear()
        self.metrics.shadow_batches.labels("missed").inc(lost)
        self._clear()
        for lender in (self.lender, other):
            lender.forget_all()
        self.lender, self._said = other, ""

    def end(self) -> None:
        """Count what waits as missed."""
        self._lose("missed", len(self._waiting))
        with contextlib.suppress(JournalError):  # the disk may be full; then these are not counted
            self.journal.count_shadow(self._uncounted)

    def describe(self) -> Json:
        """Return the live model, the shadow and how they compare."""
        with self._lock:
            found = self.journal.rollout()
            if found is None:
                raise refuse_without_shadow()
            counts = found.pop("counts")
            for how, batches in self._uncounted.items():
                counts[how] += batches
        return {**found, "waiting": len(self._waiting), **compare(counts)}

    def _answer(self, seen: Seen) -> None:
        stream = self.lender.stream(seen.stream)
        prediction, seconds = self.lender.answer(stream, seen.batch, seen.mode)
        labels = prediction.labels.tolist()
        counts = {
            "batches": 1, "images": len(labels),
            "same": sum(a == b for a, b in zip(labels, seen.labels, strict=True)),
            "live_flagged": seen.flagged, "live_seconds": seen.seconds,
            "shadow_flagged": int(flags(prediction, self.lender.served.abstain)[1].sum()), "shadow_seconds": seconds,
        }  # fmt: skip
        with self._lock:
            self.journal.note_shadow(stream, seen.number, labels, counts | self._uncounted)
            self._uncounted.clear()
        self.lender.keep(stream)
        self.metrics.shadow_batches.labels("answered").inc()
        self.metrics.shadow_images.inc(len(labels))
        self.metrics.shadow_same.inc(counts["same"])

    def _lose(self, how: str, batches: int = 1) -> None:
        with self._lock:
            self._uncounted[how] += batches
        self.metrics.shadow_batches.labels(how).inc(batches)

    def _clear(self) -> None:
        self._waiting.clear()
        self._bytes = 0

    def _say(self, stream: str, error: Exception) -> None:
        """Say in the log why a batch failed, once as long as it is the same."""
        if (words := f"{type(error).__name__}: {error}") != self._said:
            self._said = words
            log.warning(
                "the shadow failed at a batch of %s: %s", stream, words, exc_info=not isinstance(error, SaferError)
            )


class Models:
    """The model that answers, and its shadow during a roll-out."""

    def __init__(self, live: Lender, shadow: Shadow | None) -> None:
        self.live, self.shadow = live, shadow
        if shadow is not None:
            log.info("model %s is live, and %s is its shadow", live.version, shadow.lender.version)

    def forget(self, identity: str) -> None:
        """Forget what both have learnt of a stream, which is no longer on disk."""
        self.live.forget(identity)
        if self.shadow is not None:
            self.shadow.forget(identity)

    def switch(self, to: str, owner: str) -> bool:
        """Let this version answer from now on; return whether that changes anything."""
        if self.shadow is None:
            raise refuse_without_shadow()
        old, new = self.live, self.shadow.lender
        if to == old.version:
            return False
        if to != new.version:
            problem = f"version {to!r} is neither live nor the shadow"
            raise Refused(422, f"{problem}; expected {new.version} or {old.version}")
        self.shadow.switch(old, owner)
        self.live = new
        log.warning("switched from model %s to %s, as %s wished", old.version, to, owner)
        return True


def refuse_without_shadow() -> Refused:
    return Refused(404, "no model is rolled out; start the service with --shadow NEW to begin")


def check_alike(live: Served, shadow: Served) -> None:
    """Refuse a shadow whose answers could not be compared, or whose images would be others."""
    if live.version == shadow.version:
        raise InvalidValueError("the shadow is the same model as the one that is served; give another file")
    for what in ("classes", "side", "resize"):
        one, other = getattr(live, what), getattr(shadow, what)
        if one != other:
            raise InvalidValueError(
                f"the {what} of the shadow are {_show(other)}; expected {_show(one)}, as those of the model that is "
                "served, so that the answers can be compared. Serve this model in a folder of its own"
            )


def _show(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
