"""The rows of a stream: one for itself, and one for what each version of the model has learnt of it."""

import json
import sqlite3
from collections.abc import Callable

from ..._internal import safetensors_io
from ...errors import DamagedStreamError
from ...methods import Snapshot
from . import answers
from .checksums import amend, check_state, check_stream, hash_blob, hash_state, hash_stream
from .streams import Stream, pack, unpack

Kept = dict[int, Snapshot]
TABLES = (
    ("streams", "id"),
    ("states", "stream"),
    ("snapshots", "stream"),
    ("shadowed", "stream"),
    ("answers", "stream"),
)


def load(database: sqlite3.Connection, identity: str, version: str, check: Callable[[Snapshot], None]) -> Stream | None:
    """Return a stream with the state of a version; it is empty if that has not seen the stream yet."""
    if database.execute("select 1 from streams where id = ?", [identity]).fetchone() is None:
        return None
    known = check_stream(database, identity)
    columns = "owner, name, created, last, seed, batches, images, frozen"
    row = database.execute(f"select {columns} from streams where id = ?", [identity]).fetchone()
    owner, name, created, last, seed, batches, images, frozen = row
    stream = Stream(owner, name, created, last, {}, seed, batches=batches, images=images, frozen=bool(frozen))
    if version in known:
        _load_state(database, stream, version, check)
    return stream


def _load_state(database: sqlite3.Connection, stream: Stream, version: str, check: Callable[[Snapshot], None]) -> None:
    which = [stream.id, version]
    check_state(database, *which)
    query = "select guard, state from states where stream = ? and version = ?"
    guard, blob = database.execute(query, which).fetchone()
    query = "select id, state from snapshots where stream = ? and version = ?"
    try:
        kept = {
            number: safetensors_io.loads(state, f"snapshot {number}")[0]
            for number, state in database.execute(query, which)
        }
        state, memory = unpack(json.loads(guard), blob, kept)
        for snapshot in (state, *kept.values()):
            check(snapshot)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedStreamError(problem.rstrip(".")) from error
    stream.state, stream.memory, stream.kept = state, memory, kept


def create(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    row = [stream.id, stream.owner, stream.name, stream.created, stream.last, 0, 0, 0, 0, 0, stream.seed, "[]", ""]
    database.execute(f"insert into streams values ({', '.join('?' * len(row))})", row)
    return store(database, stream, version)


def store(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    """Write a stream and the state of the version that answers it; return the snapshots that are on disk.

    The stream itself is not told, as the transaction may still fail.
    """
    kept = store_state(database, stream, version)
    query = "select id, owner, name, created, labelled, right, versions from streams where id = ?"
    *named, labelled, right, versions = database.execute(query, [stream.id]).fetchone()
    mine = [stream.last, stream.batches, stream.images, labelled, right, int(stream.frozen), stream.seed]
    mine.append(_with(versions, version))
    columns = ("last", "batches", "images", "labelled", "right", "frozen", "seed", "versions", "checksum")
    assignments = ", ".join(f"{column} = ?" for column in columns)
    checksum = hash_stream(database, stream.id, [*named, *mine])
    database.execute(f"update streams set {assignments} where id = ?", [*mine, checksum, stream.id])
    return kept


def store_beside(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    """Write the state of a version that looks on; the stream itself stays as it is."""
    kept = store_state(database, stream, version)
    (versions,) = database.execute("select versions from streams where id = ?", [stream.id]).fetchone()
    if version not in json.loads(versions):
        amend(database, stream.id, "versions = ?", [_with(versions, version)])
    return kept


def store_state(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    """Write a state, and those of the guard's snapshots that are not on disk yet; return all of these."""
    wanted = stream.memory.snapshots
    kept = {row: snapshot for row, snapshot in stream.kept.items() if any(snapshot is w for w in wanted)}
    for row in stream.kept.keys() - kept.keys():
        database.execute("delete from snapshots where id = ?", [row])
    for snapshot in wanted:
        if not any(snapshot is s for s in kept.values()):
            blob = safetensors_io.dumps(snapshot)
            insert = "insert into snapshots (stream, version, hash, state) values (?, ?, ?, ?)"
            added = database.execute(insert, [stream.id, version, hash_blob(blob), blob])
            kept[int(added.lastrowid or 0)] = snapshot
    guard, state = pack(stream, kept)
    hashed = [guard, hash_blob(state)]
    values = [*hashed, hash_state(database, stream.id, version, hashed), state, stream.id, version]
    query = "update states set guard = ?, state_hash = ?, checksum = ?, state = ? where stream = ? and version = ?"
    if not database.execute(query, values).rowcount:  # an upsert would also read the last page, which may be damaged
        columns = "guard, state_hash, checksum, state, stream, version"
        database.execute(f"insert into states ({columns}) values (?, ?, ?, ?, ?, ?)", values)
    return kept


def reset(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    """Write a stream that was reset; the versions that look on begin it anew, too."""
    for table in ("states", "snapshots"):
        database.execute(f"delete from {table} where stream = ? and version != ?", [stream.id, version])
    database.execute("update streams set versions = ? where id = ?", [json.dumps([version]), stream.id])
    return store(database, stream, version)


def renew(database: sqlite3.Connection, stream: Stream, version: str) -> Kept:
    """Write a stream in the place of a damaged one."""
    database.execute("delete from snapshots where stream = ?", [stream.id])
    answers.delete_damaged(database, stream.id)
    query = "update streams set owner = ?, name = ?, created = ?, labelled = ?, right = ? where id = ?"
    named = [stream.owner, stream.name, stream.created, *answers.score(database, stream.id), stream.id]
    database.execute(query, named)
    return reset(database, stream, version)


def delete(database: sqlite3.Connection, identity: str) -> None:
    """Delete a stream without reading its states, which may be damaged."""
    for table, column in TABLES:
        database.execute(f"delete from {table} where {column} = ?", [identity])


def _with(versions: str, version: str) -> str:
    """Return a list of versions as text, with this one in it."""
    try:
        return json.dumps(sorted({*json.loads(versions), version}))
    except (TypeError, ValueError):  # damaged while the stream was in memory, from where it is written again
        return json.dumps([version])
