"""Which model of a folder answers, which one is its shadow, and how the two compare.

The table `versions` decides the roles, not the command that starts the service. So a restart with the same command
comes up with the roles as they were.
"""

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import JournalError
from .checksums import amend, hash_row
from .streams import Json

Counts = dict[str, float]

LIVE, SHADOW = "live", "shadow"
# What is counted of batches that both models have answered. With a prefix: of the answers of that model.
SIDES = ("flagged", "right", "seconds")
COUNTS = (
    "batches",
    "images",
    "missed",
    "failed",
    "same",
    "labelled",
    *(f"{r}_{n}" for r in (LIVE, SHADOW) for n in SIDES),
)


@dataclass(frozen=True)
class Version:
    """A version of what is served that has a role in a folder."""

    version: str
    role: str
    since: float  # when it took the role
    model: str = ""  # the name of its file
    counts: Counts = field(default_factory=dict)  # of the shadow: the comparison


def read(database: sqlite3.Connection) -> dict[str, Version]:
    """Return the versions by their roles."""
    found = {}
    for *row, checksum in database.execute("select version, role, since, model, counters, checksum from versions"):
        if hash_row(row) != checksum:
            raise sqlite3.DatabaseError("the table of versions is not what was written")
        version, role, since, model, counters = row
        found[role] = Version(version, role, since, model, json.loads(counters))
    if LIVE not in found:
        raise sqlite3.DatabaseError("the table of versions names no live one")
    return found


def read_earlier(database: sqlite3.Connection) -> dict[str, Version]:
    """Return the versions of a journal without that table, which has one."""
    found = database.execute("select value from meta where name = 'version'").fetchone()
    if found is None:
        raise sqlite3.DatabaseError("it does not say which model its streams belong to")
    return {LIVE: Version(found[0], LIVE, 0.0)}


def choose(found: Mapping[str, Version], folder: Path, version: str, shadow: str | None) -> tuple[str, str | None]:
    """Return (live, shadow) of what is to be served, or refuse it if the version that is live is not among it."""
    live = found[LIVE].version
    if live == version:
        return version, shadow
    if live == shadow:
        return shadow, version
    problem = f"{folder} holds streams of another model or method (version {live}, here {version})"
    if SHADOW in found and found[SHADOW].version == version:
        advice = f"This one is its shadow: serve both again, and make it live with safer serve switch {version}"
    else:
        advice = (
            "To roll this model out, start the one before with it as the shadow: safer serve --model OLD --shadow NEW. "
            "Or serve that model and method, or give another folder"
        )
    raise JournalError(f"{problem}. {advice}")


def plan(live: str, shadow: str | None, files: Mapping[str, str]) -> dict[str, Version]:
    """Return the roles as they are to be from now on."""
    wanted = {LIVE: live} | ({} if shadow is None else {SHADOW: shadow})
    return {role: Version(version, role, time.time(), files.get(version, "")) for role, version in wanted.items()}


def keep(known: Mapping[str, Version], wanted: Mapping[str, Version]) -> dict[str, Version]:
    """Return the wanted versions with what is known of those that had a role before."""
    before = {one.version: one for one in known.values()}
    kept = {}
    for role, one in wanted.items():
        was = before.get(one.version)
        kept[role] = one if was is None else replace(was, model=one.model or was.model)
    return kept


def settle(database: sqlite3.Connection, roles: Mapping[str, Version]) -> None:
    """Write the roles, and delete what belongs to others."""
    kept = {one.version for one in roles.values()}
    before = {one.version for one in read(database).values()}
    if before != kept:
        database.execute("delete from shadowed")  # which was about another pair
    for version in before - kept:
        _delete_states(database, version)
    _write(database, roles)


def add_live(database: sqlite3.Connection, version: str) -> None:
    """Note the first version of a folder."""
    _write(database, {LIVE: Version(version, LIVE, time.time())})


def switch(database: sqlite3.Connection) -> dict[str, Version]:
    """Exchange the roles; return the versions by their new ones. The comparison goes on, the other way round."""
    found, now = read(database), time.time()
    old, new = found[LIVE], found[SHADOW]
    exchanged = {LIVE: SHADOW, SHADOW: LIVE}
    counts = {}
    for name, number in new.counts.items():
        role, _, rest = name.partition("_")
        counts[f"{exchanged[role]}_{rest}" if role in exchanged else name] = number
    roles = {
        LIVE: Version(new.version, LIVE, now, new.model),
        SHADOW: Version(old.version, SHADOW, now, old.model, counts),
    }
    _write(database, roles)
    return roles


def count(database: sqlite3.Connection, more: Mapping[str, float]) -> None:
    """Add to the comparison, if there is a shadow."""
    found = read(database)
    shadow = found.get(SHADOW)
    if shadow is not None and any(more.values()):
        for name, number in more.items():
            shadow.counts[name] = shadow.counts.get(name, 0) + number
        _write(database, found)


def describe(database: sqlite3.Connection) -> Json | None:
    """Return the two versions and their counts, or None if there is no shadow."""
    found = read(database)
    if SHADOW not in found:
        return None
    known: Json = {role: {"version": v.version, "model": v.model, "since": v.since} for role, v in found.items()}
    return {**known, "counts": dict.fromkeys(COUNTS, 0) | found[SHADOW].counts}


def _write(database: sqlite3.Connection, roles: Mapping[str, Version]) -> None:
    database.execute("delete from versions")
    for one in roles.values():
        row = [one.version, one.role, one.since, one.model, json.dumps(one.counts)]
        database.execute("insert into versions values (?, ?, ?, ?, ?, ?)", [*row, hash_row(row)])


def _delete_states(database: sqlite3.Connection, version: str) -> None:
    for table in ("states", "snapshots"):
        database.execute(f"delete from {table} where version = ?", [version])
    for stream, names in database.execute("select id, versions from streams").fetchall():
        try:
            left = [name for name in json.loads(names) if name != version]
        except (TypeError, ValueError):  # its checksum says that it is damaged
            continue
        amend(database, stream, "versions = ?", [json.dumps(left)])
