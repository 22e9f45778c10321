"""The tables of the journal, and how journals of earlier versions become like it."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

from ...errors import JournalError
from . import versions
from .checksums import hash_blob, hash_row, hash_state, hash_stream

TABLES = (
    "create table meta (name text primary key, value text not null)",
    "create table versions (version text primary key, role text not null, since real not null, model text not null, "
    "counters text not null, checksum text not null)",
    "create table streams (id text primary key, owner text not null, name text not null, created real not null, "
    "last real not null, batches integer not null, images integer not null, labelled integer not null, "
    "right integer not null, frozen integer not null, seed integer not null, versions text not null, "
    "checksum text not null)",
    "create table states (stream text not null, version text not null, guard text not null, state_hash text not null, "
    "checksum text not null, state blob not null, primary key (stream, version))",
    "create table snapshots (id integer primary key, stream text not null, version text not null, hash text not null, "
    "state blob not null)",
    "create index snapshots_of on snapshots (stream, version)",
    "create table shadowed (stream text not null, number integer not null, version text not null, labels text, "
    "truth text, checksum text not null, primary key (stream, number))",
    "create table answers (stream text not null, number integer not null, key text, content text, "
    "answer text not null, report text not null, right integer, checksum text not null, primary key (stream, number))",
    "create unique index answers_by_key on answers (stream, key) where key is not null",
    "create table audit (id integer primary key, time real not null, owner text not null, stream text not null, "
    "what text not null)",
)


def read_schema(database: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 if there are none. The first version did not note it."""
    if database.execute("select 1 from sqlite_master where name = 'meta'").fetchone() is None:
        return 0
    found = database.execute("select value from meta where name = 'schema'").fetchone()
    return 1 if found is None else int(found[0])


def create(database: sqlite3.Connection, version: str) -> None:
    for statement in TABLES:
        database.execute(statement)
    database.execute("insert into meta values ('schema', ?)", [str(SCHEMA)])
    versions.add_live(database, version)


def check_schema(found: int, path: Path) -> None:
    """Refuse a journal of a later version."""
    if found > SCHEMA:
        problem = f"{path} has schema {found}; this version of safer-tta knows schemas up to {SCHEMA}"
        raise JournalError(f"{problem}. Install a newer safer-tta, or restore a backup of that time")


def migrate(database: sqlite3.Connection) -> None:
    """Bring the tables to the present version, inside the caller's transaction."""
    for found in range(read_schema(database), SCHEMA):
        MIGRATIONS[found](database)
        database.execute("insert or replace into meta values ('schema', ?)", [str(found + 1)])


def _add_checksums(database: sqlite3.Connection) -> None:
    """Note the hashes of all rows as they are; what was damaged before shows when it is read."""
    for table, column in (
        ("streams", "state_hash"),
        ("streams", "checksum"),
        ("snapshots", "hash"),
        ("answers", "checksum"),
    ):
        database.execute(f"alter table {table} add column {column} text not null default ''")
    database.create_function("hash_blob", 1, hash_blob, deterministic=True)
    database.create_function("hash_row", -1, lambda *columns: hash_row(columns), deterministic=True)
    database.execute("update snapshots set hash = hash_blob(state)")
    database.execute("update streams set state_hash = hash_blob(state)")
    for (stream,) in database.execute("select id from streams").fetchall():
        database.execute("update streams set checksum = ? where id = ?", [_hash_second(database, stream), stream])
    columns = "stream, number, key, content, answer, report, right"
    database.execute(f"update answers set checksum = hash_row({columns})")


def _separate_states(database: sqlite3.Connection) -> None:
    """Store the states of streams by the version of the model. Rows that were damaged stay recognisable as such."""
    (version,) = database.execute("select value from meta where name = 'version'").fetchone()
    identities = [stream for (stream,) in database.execute("select id from streams").fetchall()]
    query = "select checksum from streams where id = ?"
    intact = {s for s in identities if database.execute(query, [s]).fetchone() == (_hash_second(database, s),)}
    database.execute("alter table streams rename to earlier")
    database.execute("alter table snapshots add column version text not null default ''")
    database.execute("update snapshots set version = ?", [version])
    database.execute("drop index snapshots_of")
    for statement in TABLES:
        if any(name in statement for name in ("table versions", "table streams", "table states", "of on", "shadowed")):
            database.execute(statement)
    database.create_function("seed_of", 1, _seed_of, deterministic=True)
    kept = "id, owner, name, created, last, batches, images, labelled, right, frozen"
    database.execute(
        f"insert into streams ({kept}, seed, versions, checksum) select {kept}, seed_of(guard), ?, '' from earlier",
        [json.dumps([version])],
    )
    database.execute("insert into states select id, ?, guard, state_hash, '', state from earlier", [version])
    for stream in intact:
        database.execute("update streams set checksum = ? where id = ?", [hash_stream(database, stream), stream])
        query = "update states set checksum = ? where stream = ?"
        database.execute(query, [hash_state(database, stream, version), stream])
    database.execute("drop table earlier")
    database.execute("delete from meta where name = 'version'")
    versions.add_live(database, version)


def _hash_second(database: sqlite3.Connection, stream: str) -> str:
    """Return the hash of a stream's row and its snapshots as the second version of the tables had it."""
    columns = "id, owner, name, created, last, batches, images, labelled, right, frozen, guard, state_hash"
    row = database.execute(f"select {columns} from streams where id = ?", [stream]).fetchone()
    snapshots = database.execute("select id, hash from snapshots where stream = ? order by id", [stream]).fetchall()
    return hash_row([*row, snapshots])


def _seed_of(guard: object) -> int:
    """Return the seed that the text of a guard had; -1 of a damaged one."""
    try:
        seed = json.loads(str(guard))["seed"]
    except (ValueError, KeyError, TypeError):
        return -1
    return seed if isinstance(seed, int) and 0 <= seed < 2**63 else -1


# From this version to the next.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_checksums, 2: _separate_states}
SCHEMA = 1 + max(MIGRATIONS)
