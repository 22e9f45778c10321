"""An owner's streams as the API shows them, and how much they are. One that cannot be read does not hide the others."""

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from ...guards import COUNTERS
from .streams import Json, read_counters, read_watch

COLUMNS = "name, owner, created, last, batches, images, frozen, guard, right, labelled"
# What belongs to a version stands beside the stream; nothing, if that version has not seen the stream yet.
BESIDE = "streams left join states on states.stream = streams.id and states.version = :version"
UNSEEN = json.dumps({"counters": dict.fromkeys(COUNTERS, 0)})
OWNED = "{0} > :owner || '/' and {0} < :owner || '0'"  # names of streams OWNER/NAME; '0' is what follows '/'


def describe(database: sqlite3.Connection, version: str, owner: str, name: str | None) -> list[Json]:
    """Return an owner's streams, or the one of this name; rows that cannot be read are marked."""
    asked = {"version": version, "owner": owner, "name": name, "id": f"{owner}/{name}"}
    try:
        query = f"select {COLUMNS} from {BESIDE} where owner = :owner and (:name is null or name = :name) order by name"
        return [_show(row) for row in database.execute(query, asked)]
    except (sqlite3.DatabaseError, TypeError, ValueError):
        # The names are in an index, which is on other pages.
        query = f"select id from streams where {OWNED.format('id')} and (:name is null or id = :id) order by id"
        found = database.execute(query, asked).fetchall()
        return [_show_one(database, version, owner, identity) for (identity,) in found]


def count(database: sqlite3.Connection, owner: str) -> int:
    """Return how many streams an owner has."""
    query = f"select count(*) from streams where {OWNED.format('id')}"
    return int(database.execute(query, {"owner": owner}).fetchone()[0])


def nbytes_of(database: sqlite3.Connection, version: str, owner: str) -> int:
    """Return the size of an owner's answers, and of the states and snapshots of a version."""
    sizes = (
        ("length(guard) + length(state)", "states", "and version = :version"),
        ("length(state)", "snapshots", "and version = :version"),
        ("length(answer) + length(report)", "answers", ""),
    )
    owned = OWNED.format("stream")
    parts = (f"(select total({size}) from {table} where {owned} {more})" for size, table, more in sizes)
    asked = {"owner": owner, "version": version}
    return int(database.execute(f"select {' + '.join(parts)}", asked).fetchone()[0])


def alarms(database: sqlite3.Connection, version: str) -> dict[str, list[Json]]:
    """Return the active alarms of all streams that have some and can be read, by the identity of the stream."""
    try:
        streams = database.execute("select id from streams order by id").fetchall()
    except sqlite3.DatabaseError:  # the check at the start has said what is damaged
        return {}
    return {identity: found for (identity,) in streams if (found := _alarms_of(database, version, identity))}


def _alarms_of(database: sqlite3.Connection, version: str, identity: str) -> list[Json]:
    try:
        query = "select guard from states where stream = ? and version = ?"
        (guard,) = database.execute(query, [identity, version]).fetchone()
        return list(read_watch(guard).describe()["alarms"])
    except (sqlite3.DatabaseError, TypeError, ValueError):
        return []


def _show_one(database: sqlite3.Connection, version: str, owner: str, identity: str) -> Json:
    try:
        query = f"select {COLUMNS} from {BESIDE} where id = :id"
        return _show(database.execute(query, {"version": version, "id": identity}).fetchone())
    except (sqlite3.DatabaseError, TypeError, ValueError):
        name = identity.removeprefix(f"{owner}/")
        return {**_show((name, owner, 0.0, 0.0, 0, 0, 0, "", 0, 0)), "unreadable": True}


def _show(row: Sequence[Any]) -> Json:
    name, owner, created, last, batches, images, frozen, guard, right, labelled = row
    guard = UNSEEN if guard is None else guard
    return {
        "name": name, "owner": owner, "created": created, "last": last, "batches": batches, "images": images,
        "frozen": bool(frozen), "health": read_counters(guard), **read_watch(guard).describe(),
        "accuracy": 100 * right / labelled if labelled else None, "labelled": labelled,
    }  # fmt: skip
