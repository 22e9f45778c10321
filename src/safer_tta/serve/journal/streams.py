"""A stream, and how its state and its guard's memory are written as text and bytes."""

import json
import sqlite3
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._internal import safetensors_io
from ...guards import Memory, Watch
from ...methods import Snapshot

Json = dict[str, Any]


@dataclass
class Stream:
    """One stream: its owner and name, its adapted state and what its guard remembers."""

    owner: str
    name: str
    created: float
    last: float
    state: Snapshot
    seed: int  # of its generator, at the very start
    memory: Memory = field(default_factory=Memory)
    batches: int = 0
    images: int = 0
    frozen: bool = False
    kept: dict[int, Snapshot] = field(default_factory=dict)  # the guard's snapshots that are on disk, by their row

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def nbytes(self) -> int:
        snapshots = [self.state, *self.memory.snapshots]
        tensors = [*self.memory.recent, *(tensor for snapshot in snapshots for tensor in snapshot.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def pack(stream: Stream, kept: Mapping[int, Snapshot]) -> tuple[str, bytes]:
    """Return (the guard's memory as text, all tensors as bytes); its snapshots are named by their rows in `kept`."""
    memory = stream.memory
    rows = {id(snapshot): row for row, snapshot in kept.items()}
    guard = {
        "counters": dict(memory.counters),
        "behind": memory.behind,
        "since_reset": memory.since_reset,
        "judged": memory.judged,
        "last": list(memory.last),
        "watch": memory.watch.pack(),
        "healthy": [[when, rows[id(snapshot)]] for when, snapshot in memory.healthy],
        "pending": [[when, rows[id(snapshot)]] for when, snapshot in memory.pending],
    }
    tensors = {f"state.{name}": tensor for name, tensor in stream.state.items()}
    tensors |= {f"recent.{number}": probs for number, probs in enumerate(memory.recent)}
    return json.dumps(guard), safetensors_io.dumps(tensors)


def unpack(guard: Mapping[str, Any], blob: bytes, kept: Mapping[int, Snapshot]) -> tuple[Snapshot, Memory]:
    tensors, _ = safetensors_io.loads(blob, "the state of a stream")
    state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
    for snapshot in (state, *kept.values()):
        safetensors_io.check_finite("the state of a stream", snapshot)
    recent = [tensors[f"recent.{number}"] for number in range(len(tensors) - len(state))]
    memory = Memory(
        counters=Counter(guard["counters"]),
        behind=guard["behind"],
        since_reset=guard["since_reset"],
        judged=guard["judged"],
        watch=Watch.unpack(guard.get("watch")),  # earlier versions wrote none
        recent=deque(recent),
        healthy=[(when, kept[row]) for when, row in guard["healthy"]],
        pending=deque((when, kept[row]) for when, row in guard["pending"]),
    )
    memory.last.extend(guard.get("last", ()))  # journals of earlier versions have none
    return state, memory


def read_counters(guard: str) -> dict[str, int]:
    """Return a guard's counters; none for a damaged row, so that the other streams can still be listed."""
    try:
        return dict(json.loads(guard)["counters"])
    except (ValueError, KeyError, TypeError):
        return {}


def read_watch(guard: str) -> Watch:
    """Return what is known of a stream's last images; nothing for a damaged row."""
    try:
        return Watch.unpack(json.loads(guard).get("watch"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Watch()


def salvage(database: sqlite3.Connection, identity: str, version: str) -> Json:
    """Return what can still be read of a damaged stream, as fields of a `Stream`; its seed may be None."""
    query = "select created, images, frozen, seed from streams where id = ?"
    created, images, frozen, seed = database.execute(query, [identity]).fetchone()
    query = "select guard from states where stream = ? and version = ?"
    (guard,) = database.execute(query, [identity, version]).fetchone() or ("",)
    memory = Memory()
    memory.counters.update({name: n for name, n in read_counters(guard).items() if isinstance(n, int)})
    # Every batch left an answer, and the last ones are kept.
    query = "select max(number) from answers where stream = ?"
    return {
        "created": created if isinstance(created, float) else 0.0,
        "images": images if isinstance(images, int) and images >= 0 else 0,
        "batches": database.execute(query, [identity]).fetchone()[0] or 0,
        "frozen": frozen == 1,
        "seed": seed if isinstance(seed, int) and seed >= 0 else None,
        "memory": memory,
    }
