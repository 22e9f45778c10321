"""What the service writes and reads of its streams.

A batch is one transaction: the new state, the guard's memory and the answer are written together or not at all. The
answer is sent afterwards. So everything that a client has seen is on disk, and a batch on disk is not applied again.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..._internal import safetensors_io
from ...errors import DamagedStreamError
from ...methods import Snapshot
from . import answers, listing, schema
from .checksums import check_stream, hash_blob, hash_stream
from .copies import copy, examine
from .storage import NAME, Storage
from .streams import Json, Stream, pack, salvage, unpack

log = logging.getLogger("safer_tta.serve")

AUDITED = 10_000  # events of an owner, beyond which the oldest are deleted
Kept = dict[int, Snapshot]


class Answered(NamedTuple):
    """An answered batch that is to be written."""

    stream: Stream
    answer: Json
    key: str | None
    content: str  # a hash of the images
    events: Sequence[str] = ()  # for the audit log


class Journal:
    """The journal of one folder.

    Attributes:
        damaged: Streams whose stored state is not what was written, {id: what was found}.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self.damaged: dict[str, str] = {}
        self.storage = Storage(folder)
        try:
            self._prepare(version)
            self._examine()
        except BaseException:
            self.close()
            raise
        self.storage.reserve.hold()

    def _prepare(self, version: str) -> None:
        """Make the tables, or compare their version and bring them up to date."""
        storage = self.storage
        found = storage.read(schema.read_schema)
        if found:
            schema.check_schema(found, storage.path)
            storage.read(lambda database: schema.check_version(database, storage.folder, version))
        if 0 < found < schema.SCHEMA:
            before = storage.path.with_name(f"{NAME}.schema-{found}")
            copy(storage.path, before)
            log.warning(
                "%s has schema %d and is migrated to %d; a copy is in %s", storage.path, found, schema.SCHEMA, before
            )
        if found < schema.SCHEMA:
            change = schema.migrate if found else lambda database: schema.create(database, version)
            storage.write(change, freeing=True)

    def _examine(self) -> None:
        """Look for damage before the first request, and note which streams it concerns."""
        started = time.perf_counter()
        findings = examine(self.storage.path)
        self.damaged |= findings.damaged
        for problem in findings.problems():
            log.error("%s: %s", self.storage.path, problem)
        seconds = time.perf_counter() - started
        log.info("%s was checked in %.1f s: %d streams", self.storage.path, seconds, findings.streams)

    def close(self) -> None:
        self.storage.close()

    def trouble(self) -> str:
        """Return why the journal cannot be read or written, or nothing."""
        return self.storage.probe()

    # --- streams ------------------------------------------------------------------------------------------------

    def create(self, stream: Stream) -> None:
        def work(database: sqlite3.Connection) -> None:
            columns = "id, owner, name, created, last, batches, images, labelled, right, frozen, guard, state_hash"
            row = [stream.id, stream.owner, stream.name, stream.created, stream.last, 0, 0, 0, 0, 0, "", ""]
            insert = f"insert into streams ({columns}, checksum, state) values ({', '.join('?' * 12)}, '', '')"
            database.execute(insert, row)
            _store(database, stream)
            _audit(database, stream.owner, stream.name, "created")

        self.storage.write(work)

    def load(self, identity: str, check: Callable[[Snapshot], None] = lambda snapshot: None) -> Stream | None:
        """Return a stream with everything that its guard remembers.

        Raises:
            DamagedStreamError: If something of it is not what was written, or `check` refuses a state.
        """
        try:
            return self.storage.read(lambda database: _load(database, identity, check))
        except DamagedStreamError as error:
            self.damaged[identity] = str(error)
            log.error("the stored state of %s is damaged: %s", identity, error)
            raise DamagedStreamError(
                f"the stored state of this stream is damaged: {error}. Reset the stream, or delete it"
            ) from error

    def exists(self, identity: str) -> bool:
        query = "select 1 from streams where id = ?"
        return self.storage.read(lambda database: database.execute(query, [identity]).fetchone()) is not None

    def delete(self, identity: str) -> None:
        """Delete a stream without reading its state, which may be damaged."""
        owner, _, name = identity.partition("/")

        def work(database: sqlite3.Connection) -> None:
            for table, column in (("streams", "id"), ("snapshots", "stream"), ("answers", "stream")):
                database.execute(f"delete from {table} where {column} = ?", [identity])
            _audit(database, owner, name, "deleted")

        self.storage.write(work, freeing=True)
        self.damaged.pop(identity, None)

    def salvage(self, identity: str) -> Json:
        """Return what can still be read of a damaged stream, as fields of a `Stream`; its seed may be None."""
        return self.storage.read(lambda database: salvage(database, identity))

    def renew(self, stream: Stream) -> None:
        """Write a stream in the place of a damaged one, and note that it was reset."""

        def work(database: sqlite3.Connection) -> Kept:
            database.execute("delete from snapshots where stream = ?", [stream.id])
            answers.delete_damaged(database, stream.id)
            query = "update streams set owner = ?, name = ?, created = ?, labelled = ?, right = ? where id = ?"
            database.execute(
                query, [stream.owner, stream.name, stream.created, *answers.score(database, stream.id), stream.id]
            )
            _audit(database, stream.owner, stream.name, "reset")
            return _store(database, stream)

        stream.kept = self.storage.write(work, freeing=True)
        self.damaged.pop(stream.id, None)

    def describe(self, owner: str, name: str | None = None) -> list[Json]:
        """Return an owner's streams, or the one of this name, as the API shows them."""
        found = self.storage.read(lambda database: listing.describe(database, owner, name))
        for stream in found:
            if stream.pop("unreadable", False):
                self.damaged.setdefault(f"{owner}/{stream['name']}", "its row cannot be read")
        return found

    def nbytes(self) -> int:
        """Return the size of everything; room that deleted streams left in the file counts as free."""

        def work(database: sqlite3.Connection) -> int:
            names = ("page_count", "freelist_count", "page_size")
            pages, free, size = (int(database.execute(f"pragma {name}").fetchone()[0]) for name in names)
            return (pages - free) * size

        return self.storage.read(work)

    def count(self, owner: str) -> int:
        """Return how many streams an owner has."""
        return self.storage.read(lambda database: listing.count(database, owner))

    def nbytes_of(self, owner: str) -> int:
        """Return the size of an owner's states, snapshots and answers. With many answers, this takes a while."""
        return self.storage.read(lambda database: listing.nbytes_of(database, owner))

    # --- batches ------------------------------------------------------------------------------------------------

    def commit(self, stream: Stream, answer: Json, key: str | None, content: str, events: Sequence[str] = ()) -> None:
        """Write an answered batch, with everything that it changed."""
        self.commit_many([Answered(stream, answer, key, content, events)])

    def commit_many(self, batches: Iterable[Answered]) -> None:
        """Write answered batches of different streams: all of them or none."""
        batches = list(batches)
        self.storage.largest = max(self.storage.largest, *(batch.stream.nbytes for batch in batches))

        def work(database: sqlite3.Connection) -> list[Kept]:
            kept = []
            for stream, answer, key, content, events in batches:
                kept.append(_store(database, stream))
                answers.add(database, stream.id, stream.batches, answer, key, content)
                for event in events:
                    _audit(database, stream.owner, stream.name, event)
            return kept

        for batch, kept in zip(batches, self.storage.write(work), strict=True):
            batch.stream.kept = kept

    def change(self, stream: Stream, what: str) -> None:
        """Write a stream that a user has changed, and note it in the audit log."""

        def work(database: sqlite3.Connection) -> Kept:
            _audit(database, stream.owner, stream.name, what)
            return _store(database, stream)

        stream.kept = self.storage.write(work, freeing=what == "reset")

    def answer(self, identity: str, key: str) -> tuple[Json, str] | None:
        """Return the answer once given to a key, and a hash of its images."""
        return self.storage.read(lambda database: answers.find(database, identity, key))

    def reports(self, identity: str, last: int) -> list[Json]:
        """Return the reports of the last batches, oldest first."""
        return self.storage.read(lambda database: answers.reports(database, identity, last))

    def label(self, identity: str, number: int, labels: list[int]) -> Json | str | None:
        """Score a batch and return its report, what is wrong with the labels, or None if the batch is not kept."""
        return self.storage.write(lambda database: answers.label(database, identity, number, labels))

    def alarms(self) -> dict[str, list[Json]]:
        """Return the active alarms of all streams that have some, by the identity of the stream."""
        return self.storage.read(listing.alarms)

    def audit(self, owner: str, last: int = 100) -> list[Json]:
        """Return an owner's last events, newest first."""
        query = "select time, owner, stream, what from audit where owner = ? order by id desc limit ?"
        rows = self.storage.read(lambda database: database.execute(query, [owner, last]).fetchall())
        return [dict(zip(("time", "owner", "stream", "what"), row, strict=True)) for row in rows]


def _load(database: sqlite3.Connection, identity: str, check: Callable[[Snapshot], None]) -> Stream | None:
    if database.execute("select 1 from streams where id = ?", [identity]).fetchone() is None:
        return None
    check_stream(database, identity)
    columns = "owner, name, created, last, batches, images, frozen, guard, state"
    row = database.execute(f"select {columns} from streams where id = ?", [identity]).fetchone()
    owner, name, created, last, batches, images, frozen, guard, blob = row
    try:
        kept = {
            number: safetensors_io.loads(state, f"snapshot {number}")[0]
            for number, state in database.execute("select id, state from snapshots where stream = ?", [identity])
        }
        packed = json.loads(guard)
        state, memory = unpack(packed, blob, kept)
        for snapshot in (state, *kept.values()):
            check(snapshot)
        return Stream(owner, name, created, last, state, packed["seed"], memory, batches, images, bool(frozen), kept)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedStreamError(problem.rstrip(".")) from error


def _store(database: sqlite3.Connection, stream: Stream) -> Kept:
    """Write the state of a stream, and those of the guard's snapshots that are not on disk yet; return all of these.

    The stream itself is not told, as the transaction may still fail.
    """
    wanted = stream.memory.snapshots
    kept = {row: snapshot for row, snapshot in stream.kept.items() if any(snapshot is w for w in wanted)}
    for row in stream.kept.keys() - kept.keys():
        database.execute("delete from snapshots where id = ?", [row])
    for snapshot in wanted:
        if not any(snapshot is s for s in kept.values()):
            blob = safetensors_io.dumps(snapshot)
            insert = "insert into snapshots (stream, hash, state) values (?, ?, ?)"
            added = database.execute(insert, [stream.id, hash_blob(blob), blob])
            kept[int(added.lastrowid or 0)] = snapshot
    guard, state = pack(stream, kept)
    query = "select id, owner, name, created, labelled, right from streams where id = ?"
    *named, labelled, right = database.execute(query, [stream.id]).fetchone()
    mine = [stream.last, stream.batches, stream.images, labelled, right, int(stream.frozen), guard, hash_blob(state)]
    checksum = hash_stream(database, stream.id, [*named, *mine])
    columns = ("last", "batches", "images", "labelled", "right", "frozen", "guard", "state_hash", "checksum", "state")
    assignments = ", ".join(f"{column} = ?" for column in columns)
    database.execute(f"update streams set {assignments} where id = ?", [*mine, checksum, state, stream.id])
    return kept


def _audit(database: sqlite3.Connection, owner: str, stream: str, what: str) -> None:
    event = [time.time(), owner, stream, what]
    database.execute("insert into audit (time, owner, stream, what) values (?, ?, ?, ?)", event)
    old = "delete from audit where owner = ? and id <= (select max(id) from audit where owner = ?) - ?"
    database.execute(old, [owner, owner, AUDITED])
