"""What has happened: events of an owner, of which the last ones are kept."""

import sqlite3
import time

from .streams import Json

KEPT = 10_000  # events of an owner, beyond which the oldest are deleted
COLUMNS = ("time", "owner", "stream", "what")


def add(database: sqlite3.Connection, owner: str, stream: str, what: str) -> None:
    event = [time.time(), owner, stream, what]
    database.execute(f"insert into audit ({', '.join(COLUMNS)}) values (?, ?, ?, ?)", event)
    old = "delete from audit where owner = ? and id <= (select max(id) from audit where owner = ?) - ?"
    database.execute(old, [owner, owner, KEPT])


def read(database: sqlite3.Connection, owner: str, last: int) -> list[Json]:
    """Return an owner's last events, newest first."""
    query = f"select {', '.join(COLUMNS)} from audit where owner = ? order by id desc limit ?"
    return [dict(zip(COLUMNS, row, strict=True)) for row in database.execute(query, [owner, last])]
