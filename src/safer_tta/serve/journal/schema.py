"""The tables of the journal, and how journals of earlier versions become like it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from ...errors import JournalError
from .checksums import hash_blob, hash_row, hash_stream

TABLES = (
    "create table meta (name text primary key, value text not null)",
    "create table streams (id text primary key, owner text not null, name text not null, created real not null, "
    "last real not null, batches integer not null, images integer not null, labelled integer not null, "
    "right integer not null, frozen integer not null, guard text not null, state_hash text not null, "
    "checksum text not null, state blob not null)",
    "create table snapshots (id integer primary key, stream text not null, hash text not null, state blob not null)",
    "create index snapshots_of on snapshots (stream)",
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
    database.executemany("insert into meta values (?, ?)", [("version", version), ("schema", str(SCHEMA))])


def check_version(database: sqlite3.Connection, folder: Path, version: str) -> None:
    """Refuse a journal of another model or method."""
    found = database.execute("select value from meta where name = 'version'").fetchone()
    if found is not None and found[0] != version:
        problem = f"{folder} holds streams of another model or method (version {found[0]}, here {version})"
        raise JournalError(f"{problem}. Serve that model and method, or give another folder")


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
        database.execute("update streams set checksum = ? where id = ?", [hash_stream(database, stream), stream])
    columns = "stream, number, key, content, answer, report, right"
    database.execute(f"update answers set checksum = hash_row({columns})")


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _add_checksums}  # from this version to the next
SCHEMA = 1 + max(MIGRATIONS)
