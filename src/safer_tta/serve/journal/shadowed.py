"""What the shadow answered to the last batches of a stream, kept until their labels come, and these labels."""

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence

from . import versions
from .answers import KEPT, find_labels
from .checksums import hash_row
from .versions import LIVE, SHADOW

COLUMNS = "stream, number, version, labels, truth"


def add(database: sqlite3.Connection, stream: str, number: int, version: str, labels: list[int]) -> None:
    """Note what the shadow answered; if the true labels are known already, it is scored."""
    known = _read(database, stream, number)
    truth = None if known is None or known[0] != version else known[2]
    _write(database, stream, number, version, labels, truth)
    if truth is not None:
        _score(database, stream, number, version, labels, truth, 1)
    database.execute("delete from shadowed where stream = ? and number <= ?", [stream, number - KEPT])


def label(database: sqlite3.Connection, stream: str, number: int, truth: list[int]) -> None:
    """Score what the shadow answered, or will answer, to a batch. Labels given a second time replace the first."""
    shadow = versions.read(database).get(SHADOW)
    if shadow is None:
        return
    version, labels, before = _read(database, stream, number) or (shadow.version, None, None)
    if labels is not None:
        if before is not None:
            _score(database, stream, number, version, labels, before, -1)
        _score(database, stream, number, version, labels, truth, 1)
    _write(database, stream, number, version, labels, truth)


def _score(
    database: sqlite3.Connection,
    stream: str,
    number: int,
    version: str,
    labels: Sequence[int],
    truth: Sequence[int],
    times: int,
) -> None:
    """Count, or uncount, a batch whose labels are known, if both models that answered it still have a role."""
    answered = find_labels(database, stream, number)
    roles = {one.version: role for role, one in versions.read(database).items()}
    if answered is None or {roles.get(version), roles.get(answered[0])} != {LIVE, SHADOW}:
        return
    counts = Counter({"labelled": times * len(truth)})
    for one, given in ((version, labels), answered):
        right = sum(a == b for a, b in zip(given, truth, strict=True))
        counts[f"{roles[one]}_right"] += times * right
    versions.count(database, counts)


def _read(
    database: sqlite3.Connection, stream: str, number: int
) -> tuple[str, list[int] | None, list[int] | None] | None:
    """Return (version, labels, true labels) of a batch; None if there is nothing, or it is damaged."""
    query = f"select {COLUMNS}, checksum from shadowed where stream = ? and number = ?"
    row = database.execute(query, [stream, number]).fetchone()
    if row is None or hash_row(row[:-1]) != row[-1]:
        return None
    labels, truth = (None if text is None else json.loads(text) for text in row[3:5])
    return row[2], labels, truth


def _write(
    database: sqlite3.Connection,
    stream: str,
    number: int,
    version: str,
    labels: list[int] | None,
    truth: list[int] | None,
) -> None:
    texts = [None if given is None else json.dumps(given) for given in (labels, truth)]
    row = [stream, number, version, *texts]
    query = f"insert or replace into shadowed ({COLUMNS}, checksum) values (?, ?, ?, ?, ?, ?)"
    database.execute(query, [*row, hash_row(row)])
