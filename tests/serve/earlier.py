"""Journals as earlier versions wrote them."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from safer_tta._internal import safetensors_io
from safer_tta._internal.hashing import hash_bytes

FIRST = """
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

SECOND = """
create table meta (name text primary key, value text not null);
create table streams (
    id text primary key, owner text not null, name text not null, created real not null, last real not null,
    batches integer not null, images integer not null, labelled integer not null, right integer not null,
    frozen integer not null, guard text not null, state_hash text not null, checksum text not null,
    state blob not null);
create table snapshots (id integer primary key, stream text not null, hash text not null, state blob not null);
create index snapshots_of on snapshots (stream);
create table answers (
    stream text not null, number integer not null, key text, content text, answer text not null, report text not null,
    right integer, checksum text not null, primary key (stream, number));
create unique index answers_by_key on answers (stream, key) where key is not null;
create table audit (
    id integer primary key, time real not null, owner text not null, stream text not null, what text not null);
"""
STATE, SNAPSHOT = {"x": torch.arange(3.0)}, {"x": torch.ones(3)}
Tensors = dict[str, torch.Tensor]


def content() -> tuple[list[list[Any]], bytes, list[Any]]:
    """Return two streams with their states, a snapshot of the first one's guard, and an answer."""
    guard = {"seed": 7, "counters": {"batches": 3}, "behind": 0.5, "since_reset": 3, "judged": 3}
    guard |= {"healthy": [[1, 1]], "pending": []}
    blob = safetensors_io.dumps({"state.x": STATE["x"], "recent.0": torch.ones(2, 3)})
    streams = [
        ["anna/a", "anna", "a", 1.5, 2.5, 3, 6, 2, 1, 1, json.dumps(guard), blob],
        ["anna/b", "anna", "b", 1.5, 2.5, 0, 0, 0, 0, 0, json.dumps(guard), b"12345678 nonsense"],
    ]
    answer = [json.dumps({"labels": [0, 1]}), json.dumps({"number": 3})]
    return streams, safetensors_io.dumps(SNAPSHOT), ["anna/a", 3, "k", "c", *answer, 1]


def hash_row(row: Sequence[Any]) -> str:
    return hash_bytes([json.dumps(list(row)).encode()]).hex()


def write_first(folder: Path) -> tuple[Tensors, Tensors]:
    """Write a journal without checksums; return the state and the snapshot of a stream in it."""
    streams, snapshot, answer = content()
    folder.mkdir()
    with closing(sqlite3.connect(folder / "streams.sqlite")) as database, database:
        database.execute("pragma journal_mode = wal")
        database.executescript(FIRST)
        database.execute("insert into meta values ('version', 'v')")
        for row in streams:
            database.execute(f"insert into streams values ({', '.join('?' * 12)})", row)
        database.execute("insert into snapshots values (1, 'anna/a', ?)", [snapshot])
        database.execute("insert into answers values (?, ?, ?, ?, ?, ?, ?)", answer)
        database.execute("insert into audit values (1, 1.5, 'anna', 'a', 'created')")
    return STATE, SNAPSHOT


def write_second(folder: Path) -> tuple[Tensors, Tensors]:
    """Write a journal whose states are those of the only model; return the state and the snapshot of a stream."""
    streams, snapshot, answer = content()
    folder.mkdir()
    with closing(sqlite3.connect(folder / "streams.sqlite")) as database, database:
        database.execute("pragma journal_mode = wal")
        database.executescript(SECOND)
        database.executemany("insert into meta values (?, ?)", [("version", "v"), ("schema", "2")])
        kept = hash_bytes([snapshot]).hex()
        database.execute("insert into snapshots values (1, 'anna/a', ?, ?)", [kept, snapshot])
        for *row, state in streams:
            row.append(hash_bytes([state]).hex())
            checksum = hash_row([*row, [[1, kept]] if row[2] == "a" else []])
            database.execute(f"insert into streams values ({', '.join('?' * 14)})", [*row, checksum, state])
        database.execute("insert into answers values (?, ?, ?, ?, ?, ?, ?, ?)", [*answer, hash_row(answer)])
        database.execute("insert into audit values (1, 1.5, 'anna', 'a', 'created')")
    return STATE, SNAPSHOT


WRITERS = {1: write_first, 2: write_second}
