"""The active alarms of all streams, and who is told of a change: the audit log, the metrics and a webhook."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..guards import KINDS
from .journal import Journal, Json, Stream
from .metrics import Metrics
from .webhook import Sender


@dataclass(frozen=True)
class Change:
    """An alarm that is raised or cleared."""

    event: str  # "raised" or "cleared"
    words: str
    alarm: Json

    @property
    def audited(self) -> str:
        return f"alarm {self.event}: {self.words}"


class Alarms:
    """Knows the active alarms of every stream, of those that are only on disk too."""

    def __init__(self, journal: Journal, metrics: Metrics, sender: Sender | None) -> None:
        self._metrics, self._sender = metrics, sender
        self._lock = threading.Lock()
        self._active: dict[str, list[Json]] = journal.alarms()
        for kind in KINDS:
            metrics.alarms_raised.labels(kind)  # known from the start, with 0
        self._count()

    def of(self, owner: str) -> list[Json]:
        """Return the active alarms of an owner, the newest first."""
        with self._lock:
            streams = [item for item in self._active.items() if item[0].startswith(f"{owner}/")]
        alarms = [{"stream": stream.partition("/")[2], **alarm} for stream, them in streams for alarm in them]
        return sorted(alarms, key=lambda alarm: (-alarm["since"], alarm["stream"]))

    def changes(self, stream: Stream) -> list[Change]:
        """Return what a batch has changed, before it is on disk."""
        before = {alarm["kind"]: alarm for alarm in self._active.get(stream.id, [])}
        now = {alarm["kind"]: alarm for alarm in stream.memory.watch.describe()["alarms"]}
        raised = [Change("raised", alarm["words"], alarm) for kind, alarm in now.items() if kind not in before]
        cleared = [Change("cleared", KINDS[k].cleared, alarm) for k, alarm in before.items() if k not in now]
        return raised + cleared

    def tell(self, stream: Stream, changes: list[Change], report: Mapping[str, Any]) -> None:
        """Take over the alarms of a stream whose batch is on disk, and tell what has changed."""
        self._keep(stream.id, report["alarms"])
        for change in changes:
            self._post(stream.id, change, report["time"], stream.memory.watch.suspicious)

    def forget(self, identity: str) -> None:
        """Clear the alarms of a stream that is deleted."""
        alarms = self._active.get(identity, [])
        self._keep(identity, [])
        for alarm in alarms:
            self._post(identity, Change("cleared", "the stream was deleted", alarm), time.time(), None)

    def take_over(self, active: dict[str, list[Json]]) -> None:
        """Take over the alarms of another model, which answers from now on, and tell what differs."""
        with self._lock:
            before, self._active = self._active, active
        self._count()
        now = time.time()
        for event, some, others in (("cleared", before, active), ("raised", active, before)):
            for identity, alarms in some.items():
                known = {alarm["kind"] for alarm in others.get(identity, [])}
                for alarm in alarms:
                    if alarm["kind"] not in known:
                        words = alarm["words"] if event == "raised" else "another model answers"
                        self._post(identity, Change(event, words, alarm), now, None)

    def _keep(self, identity: str, alarms: list[Json]) -> None:
        with self._lock:
            self._active.pop(identity, None)
            if alarms:
                self._active[identity] = alarms
        self._count()

    def _count(self) -> None:
        for kind in KINDS:
            active = sum(alarm["kind"] == kind for them in self._active.values() for alarm in them)
            self._metrics.alarms_active.labels(kind).set(active)

    def _post(self, identity: str, change: Change, now: float, suspicious: float | None) -> None:
        owner, _, name = identity.partition("/")
        if change.event == "raised":
            self._metrics.alarms_raised.labels(change.alarm["kind"]).inc()
        if self._sender is not None:
            about = {"owner": owner, "stream": name, "time": now, "suspicious": suspicious}
            self._sender.send({"event": change.event, "words": change.words, "alarm": change.alarm, **about})
