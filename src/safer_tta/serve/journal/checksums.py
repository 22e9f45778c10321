"""A hash of every row: SQLite does not notice it if a byte of a page changes on disk."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..._internal.hashing import hash_bytes
from ...errors import DamagedStreamError

# Of the table `streams`: all but the checksum.
COLUMNS = "id, owner, name, created, last, batches, images, labelled, right, frozen, seed, versions"
# Errors of SQLite that say nothing about what is stored.
PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
}


def hash_row(columns: Sequence[Any]) -> str:
    """Return a hash of text and numbers; SQLite gives numbers back as they were."""
    return hash_bytes([json.dumps(list(columns)).encode()]).hex()


def hash_blob(content: bytes) -> str:
    return hash_bytes([content]).hex()


def hash_stream(database: sqlite3.Connection, stream: str, row: Sequence[Any] | None = None) -> str:
    """Return the hash of a stream's row, which is read if it is not given."""
    if row is None:
        row = database.execute(f"select {COLUMNS} from streams where id = ?", [stream]).fetchone()
    return hash_row(row)


def hash_state(database: sqlite3.Connection, stream: str, version: str, row: Sequence[Any] | None = None) -> str:
    """Return the hash of (guard, hash of the state) of a stream's state, read if not given, and of its snapshots."""
    which = [stream, version]
    if row is None:
        query = "select guard, state_hash from states where stream = ? and version = ?"
        row = database.execute(query, which).fetchone()
    query = "select id, hash from snapshots where stream = ? and version = ? order by id"
    return hash_row([*which, *row, database.execute(query, which).fetchall()])


def amend(database: sqlite3.Connection, stream: str, change: str, values: Sequence[Any]) -> None:
    """Change columns of a stream's row; one that is damaged stays recognisable as such."""
    (checksum,) = database.execute("select checksum from streams where id = ?", [stream]).fetchone()
    intact = checksum == hash_stream(database, stream)
    database.execute(f"update streams set {change} where id = ?", [*values, stream])
    if intact:
        query = "update streams set checksum = ? where id = ?"
        database.execute(query, [hash_stream(database, stream), stream])


def check_stream(database: sqlite3.Connection, stream: str) -> list[str]:
    """Refuse a stream whose row is not as it was written; return the versions of the model that have a state of it."""
    with _damage_in_words():
        query = "select checksum, versions from streams where id = ?"
        checksum, versions = database.execute(query, [stream]).fetchone()
        _check(checksum == hash_stream(database, stream), "its row")
        return list(json.loads(versions))


def check_state(database: sqlite3.Connection, stream: str, version: str) -> None:
    """Refuse a stream of whose state something is not as it was written."""
    which = [stream, version]
    with _damage_in_words():
        query = "select state, state_hash, checksum from states where stream = ? and version = ?"
        found = database.execute(query, which).fetchone()
        if found is None:
            raise DamagedStreamError("its state is gone")
        state, state_hash, checksum = found
        _check(checksum == hash_state(database, stream, version), "what its guard remembers")
        _check(hash_blob(state) == state_hash, "its state")
        query = "select id, state, hash from snapshots where stream = ? and version = ?"
        for number, blob, written in database.execute(query, which):
            _check(hash_blob(blob) == written, f"snapshot {number} of its guard")


@contextmanager
def _damage_in_words() -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, TypeError, ValueError) as error:  # a page of it, or the type of a column
        if not is_damage(error):
            raise
        raise DamagedStreamError(f"it cannot be read ({error})") from error


def is_damage(error: Exception) -> bool:
    """Return whether an error of reading lies in what is stored: a page, text that is none, the type of a column."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_IOERR_READ or code & 0xFF not in PASSING


def _check(intact: bool, what: str) -> None:
    if not intact:
        raise DamagedStreamError(f"{what} is not what was written")


def damaged_answers(database: sqlite3.Connection, stream: str) -> Iterator[int]:
    """Yield the numbers of the answers that are not as they were written."""
    query = "select number, key, content, answer, report, right, checksum from answers where stream = ?"
    for *columns, checksum in database.execute(query, [stream]):
        if hash_row([stream, *columns]) != checksum:
            yield columns[0]
