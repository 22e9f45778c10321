"""Streams, their states and their last answers in one SQLite file, which outlives the process.

A batch is one transaction: the new state, the guard's memory and the answer are written together or not at all. The
answer is sent afterwards. So everything that a client has seen is on disk, and a batch on disk is not applied again.
"""

import json
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._internal import safetensors_io
from ..data.store import locked
from ..errors import JournalError
from ..guards import Memory
from ..methods import Snapshot

KEPT = 256  # batches of a stream whose answers are kept
AUDITED = 10_000  # events in all, beyond which an owner's oldest are deleted
SCHEMA = """
create table if not exists meta (name text primary key, value text not null);
create table if not exists streams (
    id text primary key, owner text not null, name text not null, created real not null, last real not null,
    batches integer not null, images integer not null, labelled integer not null, right integer not null,
    frozen integer not null, guard text not null, state blob not null);
create table if not exists snapshots (id integer primary key, stream text not null, state blob not null);
create index if not exists snapshots_of on snapshots (stream);
create table if not exists answers (
    stream text not null, number integer not null, key text, content text, answer text not null, report text not null,
    right integer, primary key (stream, number));
create unique index if not exists answers_by_key on answers (stream, key) where key is not null;
create table if not exists audit (
    id integer primary key, time real not null, owner text not null, stream text not null, what text not null);
"""
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


class _Local(threading.local):
    connection: sqlite3.Connection | None = None


class Journal:
    """The journal of one folder, with one writer and any number of readers. Every thread has its own connection."""

    def __init__(self, folder: Path, version: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()  # two services on one folder would overwrite each other's streams
        try:
            self._lock.enter_context(locked(folder / "lock", wait=False))
        except BlockingIOError:
            raise JournalError(f"{folder} is in use by another service; stop it, or give another folder") from None
        self.path = folder / "streams.sqlite"
        self._local = _Local()
        try:
            self._check_version(folder, version)
        except BaseException:
            self.close()
            raise

    def _check_version(self, folder: Path, version: str) -> None:
        """Write the version, or compare it with the one on disk."""
        try:
            with self._transaction() as database:
                database.executescript(SCHEMA)
                found = database.execute("select value from meta where name = 'version'").fetchone()
                if found is None:
                    database.execute("insert into meta values ('version', ?)", [version])
        except sqlite3.DatabaseError as error:
            problem = f"{self.path} is damaged, or not a journal of this service ({error})"
            raise JournalError(f"{problem}. Give another folder") from error
        if found is not None and found[0] != version:
            problem = f"{folder} holds streams of another model or method (version {found[0]}, here {version})"
            raise JournalError(f"{problem}. Serve that model and method, or give another folder")

    def close(self) -> None:
        if self._local.connection is not None:
            self._local.connection.close()
            self._local.connection = None
        self._lock.close()

    @property
    def _database(self) -> sqlite3.Connection:
        if self._local.connection is None:
            connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")  # an answer also outlives a power cut
            self._local.connection = connection
        return self._local.connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self._database
        database.execute("begin immediate")
        try:
            yield database
        except BaseException:
            database.execute("rollback")
            raise
        if database.in_transaction:  # executescript has ended it already
            database.execute("commit")

    # --- streams ------------------------------------------------------------------------------------------------

    def create(self, stream: Stream) -> None:
        with self._transaction() as database:
            row = [stream.id, stream.owner, stream.name, stream.created, stream.last, *_pack(stream)]
            database.execute("insert into streams values (?, ?, ?, ?, ?, 0, 0, 0, 0, 0, ?, ?)", row)
            _audit(database, stream.owner, stream.name, "created")

    def load(self, identity: str) -> Stream | None:
        """Return a stream with everything that its guard remembers."""
        row = self._database.execute("select * from streams where id = ?", [identity]).fetchone()
        if row is None:
            return None
        _, owner, name, created, last, batches, images, _, _, frozen, guard, blob = row
        kept = {
            number: safetensors_io.loads(state, f"snapshot {number}")[0]
            for number, state in self._database.execute("select id, state from snapshots where stream = ?", [identity])
        }
        packed = json.loads(guard)
        state, memory = _unpack(packed, blob, kept)
        return Stream(owner, name, created, last, state, packed["seed"], memory, batches, images, bool(frozen), kept)

    def exists(self, identity: str) -> bool:
        return self._database.execute("select 1 from streams where id = ?", [identity]).fetchone() is not None

    def delete(self, identity: str) -> None:
        """Delete a stream without reading its state, which may be damaged."""
        owner, _, name = identity.partition("/")
        with self._transaction() as database:
            for table, column in (("streams", "id"), ("snapshots", "stream"), ("answers", "stream")):
                database.execute(f"delete from {table} where {column} = ?", [identity])
            _audit(database, owner, name, "deleted")

    def describe(self, owner: str, name: str | None = None) -> list[Json]:
        """Return an owner's streams, or the one of this name, as the API shows them."""
        rows = self._database.execute(
            "select name, owner, created, last, batches, images, frozen, guard, right, labelled"
            " from streams where owner = ? and (? is null or name = ?) order by name",
            [owner, name, name],
        )
        return [
            {
                "name": n, "owner": o, "created": created, "last": last, "batches": batches, "images": images,
                "frozen": bool(frozen), "health": _read_counters(guard),
                "accuracy": 100 * right / labelled if labelled else None, "labelled": labelled,
            }
            for n, o, created, last, batches, images, frozen, guard, right, labelled in rows
        ]  # fmt: skip

    def nbytes(self) -> int:
        """Return the size of everything; room that deleted streams left in the file counts as free."""
        pages, free, size = (
            int(self._database.execute(f"pragma {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    # --- batches ------------------------------------------------------------------------------------------------

    def commit(self, stream: Stream, answer: Json, key: str | None, content: str) -> None:
        """Write an answered batch, with everything that it changed."""
        with self._transaction() as database:
            self._store(database, stream)
            texts = [json.dumps(part, allow_nan=False) for part in (answer, answer["report"])]
            row = [stream.id, stream.batches, key, content, *texts]
            database.execute("insert into answers values (?, ?, ?, ?, ?, ?, null)", row)
            database.execute("delete from answers where stream = ? and number <= ?", [stream.id, stream.batches - KEPT])

    def change(self, stream: Stream, what: str) -> None:
        """Write a stream that a user has changed, and note it in the audit log."""
        with self._transaction() as database:
            self._store(database, stream)
            _audit(database, stream.owner, stream.name, what)

    def answer(self, identity: str, key: str) -> tuple[Json, str] | None:
        """Return the answer once given to a key, and a hash of its images."""
        query = "select answer, content from answers where stream = ? and key = ?"
        found = self._database.execute(query, [identity, key]).fetchone()
        return None if found is None else (json.loads(found[0]), found[1])

    def reports(self, identity: str, last: int) -> list[Json]:
        """Return the reports of the last batches, oldest first."""
        query = "select report from answers where stream = ? order by number desc limit ?"
        return [json.loads(row[0]) for row in self._database.execute(query, [identity, last])][::-1]

    def label(self, identity: str, number: int, labels: list[int]) -> Json | str | None:
        """Score a batch and return its report, what is wrong with the labels, or None if the batch is not kept."""
        with self._transaction() as database:
            query = "select answer, report, right from answers where stream = ? and number = ?"
            row = database.execute(query, [identity, number]).fetchone()
            if row is None:
                return None
            given, report = json.loads(row[0])["labels"], json.loads(row[1])
            if len(labels) != len(given):
                return f"{len(labels)} labels came for a batch of {len(given)} images"
            right = sum(a == b for a, b in zip(given, labels, strict=True))
            report["accuracy"] = 100 * right / len(labels)
            query = "update answers set right = ?, report = ? where stream = ? and number = ?"
            database.execute(query, [right, json.dumps(report), identity, number])
            # Labels given a second time replace the first.
            more = (right, len(labels)) if row[2] is None else (right - row[2], 0)
            query = "update streams set right = right + ?, labelled = labelled + ? where id = ?"
            database.execute(query, [*more, identity])
            return dict(report)

    def audit(self, owner: str, last: int = 100) -> list[Json]:
        """Return an owner's last events, newest first."""
        query = "select time, owner, stream, what from audit where owner = ? order by id desc limit ?"
        rows = self._database.execute(query, [owner, last])
        return [dict(zip(("time", "owner", "stream", "what"), row, strict=True)) for row in rows]

    def _store(self, database: sqlite3.Connection, stream: Stream) -> None:
        """Write the state of a stream, and those of the guard's snapshots that are not on disk yet."""
        wanted = stream.memory.snapshots
        for row in [row for row, s in stream.kept.items() if not any(s is w for w in wanted)]:
            database.execute("delete from snapshots where id = ?", [row])
            del stream.kept[row]
        for snapshot in wanted:
            if not any(snapshot is s for s in stream.kept.values()):
                blob = safetensors_io.dumps(snapshot)
                added = database.execute("insert into snapshots (stream, state) values (?, ?)", [stream.id, blob])
                stream.kept[int(added.lastrowid or 0)] = snapshot
        guard, state = _pack(stream)
        database.execute(
            "update streams set last = ?, batches = ?, images = ?, frozen = ?, guard = ?, state = ? where id = ?",
            [stream.last, stream.batches, stream.images, int(stream.frozen), guard, state, stream.id],
        )


def _audit(database: sqlite3.Connection, owner: str, stream: str, what: str) -> None:
    event = [time.time(), owner, stream, what]
    database.execute("insert into audit (time, owner, stream, what) values (?, ?, ?, ?)", event)
    old = "delete from audit where owner = ? and id <= (select max(id) from audit where owner = ?) - ?"
    database.execute(old, [owner, owner, AUDITED])


def _read_counters(guard: str) -> Json:
    """Return a guard's counters; none for a damaged row, so that the other streams can still be listed."""
    try:
        return dict(json.loads(guard)["counters"])
    except (ValueError, KeyError, TypeError):
        return {}


def _pack(stream: Stream) -> tuple[str, bytes]:
    """Return (the guard's memory as text, all tensors as bytes); its snapshots are named by their rows."""
    memory = stream.memory
    rows = {id(snapshot): row for row, snapshot in stream.kept.items()}
    guard = {
        "seed": stream.seed,
        "counters": dict(memory.counters),
        "behind": memory.behind,
        "since_reset": memory.since_reset,
        "judged": memory.judged,
        "healthy": [[when, rows[id(snapshot)]] for when, snapshot in memory.healthy],
        "pending": [[when, rows[id(snapshot)]] for when, snapshot in memory.pending],
    }
    tensors = {f"state.{name}": tensor for name, tensor in stream.state.items()}
    tensors |= {f"recent.{number}": probs for number, probs in enumerate(memory.recent)}
    return json.dumps(guard), safetensors_io.dumps(tensors)


def _unpack(guard: Mapping[str, Any], blob: bytes, kept: Mapping[int, Snapshot]) -> tuple[Snapshot, Memory]:
    tensors, _ = safetensors_io.loads(blob, "the state of a stream")
    state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
    recent = [tensors[f"recent.{number}"] for number in range(len(tensors) - len(state))]
    memory = Memory(
        counters=Counter(guard["counters"]),
        behind=guard["behind"],
        since_reset=guard["since_reset"],
        judged=guard["judged"],
        recent=deque(recent),
        healthy=[(when, kept[row]) for when, row in guard["healthy"]],
        pending=deque((when, kept[row]) for when, row in guard["pending"]),
    )
    return state, memory
