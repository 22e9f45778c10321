"""A hash of every row: SQLite does not notice it if a byte of a page changes on disk."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from ..._internal.hashing import hash_bytes
from ...errors import DamagedStreamError

# Of the table `streams`: all but the state, which has a hash of its own.
COLUMNS = "id, owner, name, created, last, batches, images, labelled, right, frozen, guard, state_hash"
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
    """Return the hash of a stream's row, which is read if it is not given, and of those of its snapshots."""
    if row is None:
        row = database.execute(f"select {COLUMNS} from streams where id = ?", [stream]).fetchone()
    snapshots = database.execute("select id, hash from snapshots where stream = ? order by id", [stream]).fetchall()
    return hash_row([*row, snapshots])


def check_stream(database: sqlite3.Connection, stream: str) -> None:
    """Refuse a stream of which something is not as it was written."""
    try:
        query = "select state, state_hash, checksum from streams where id = ?"
        state, state_hash, checksum = database.execute(query, [stream]).fetchone()
        _check(checksum == hash_stream(database, stream), "its row")
        _check(hash_blob(state) == state_hash, "its state")
        query = "select id, state, hash from snapshots where stream = ?"
        for number, blob, written in database.execute(query, [stream]):
            _check(hash_blob(blob) == written, f"snapshot {number} of its guard")
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
