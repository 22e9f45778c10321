"""The answers that were given: kept to be given again, and scored when labels come."""

import json
import sqlite3

from ...errors import DamagedStreamError
from .checksums import amend, damaged_answers, hash_row
from .streams import Json

KEPT = 256  # batches of a stream whose answers are kept
COLUMNS = "stream, number, key, content, answer, report, right"


def add(database: sqlite3.Connection, stream: str, number: int, answer: Json, key: str | None, content: str) -> None:
    """Write the answer to a batch; the oldest is forgotten."""
    texts = [json.dumps(part, allow_nan=False) for part in (answer, answer["report"])]
    row = [stream, number, key, content, *texts, None]
    database.execute(
        f"insert into answers ({COLUMNS}, checksum) values (?, ?, ?, ?, ?, ?, ?, ?)", [*row, hash_row(row)]
    )
    database.execute("delete from answers where stream = ? and number <= ?", [stream, number - KEPT])


def find(database: sqlite3.Connection, stream: str, key: str) -> tuple[Json, str] | None:
    """Return the answer once given to a key, and a hash of its images."""
    query = f"select {COLUMNS}, checksum from answers where stream = ? and key = ?"
    row = database.execute(query, [stream, key]).fetchone()
    if row is None:
        return None
    _check(row)
    _, _, _, content, answer, *_ = row
    return json.loads(answer), content


def reports(database: sqlite3.Connection, stream: str, last: int) -> list[Json]:
    """Return the reports of the last batches, oldest first, without any that is damaged."""
    query = f"select {COLUMNS}, checksum from answers where stream = ? order by number desc limit ?"
    rows = database.execute(query, [stream, last]).fetchall()
    return [json.loads(row[5]) for row in rows if hash_row(row[:-1]) == row[-1]][::-1]


def label(database: sqlite3.Connection, stream: str, number: int, labels: list[int]) -> Json | str | None:
    """Score a batch and return its report, what is wrong with the labels, or None if the batch is not kept."""
    query = f"select {COLUMNS}, checksum from answers where stream = ? and number = ?"
    row = database.execute(query, [stream, number]).fetchone()
    if row is None:
        return None
    _check(row)
    _, _, key, content, answer, text, before, _ = row
    given, report = json.loads(answer)["labels"], json.loads(text)
    if len(labels) != len(given):
        return f"{len(labels)} labels came for a batch of {len(given)} images"
    right = sum(a == b for a, b in zip(given, labels, strict=True))
    report["accuracy"] = 100 * right / len(labels)
    row = [stream, number, key, content, answer, json.dumps(report), right]
    query = "update answers set right = ?, report = ?, checksum = ? where stream = ? and number = ?"
    database.execute(query, [right, row[5], hash_row(row), stream, number])
    # Labels given a second time replace the first.
    more = (right, len(labels)) if before is None else (right - before, 0)
    amend(database, stream, "right = right + ?, labelled = labelled + ?", more)
    return dict(report)


def find_labels(database: sqlite3.Connection, stream: str, number: int) -> tuple[str, list[int]] | None:
    """Return the version that answered a batch and its labels; None if the answer is not kept, or damaged."""
    query = f"select {COLUMNS}, checksum from answers where stream = ? and number = ?"
    row = database.execute(query, [stream, number]).fetchone()
    if row is None or hash_row(row[:-1]) != row[-1]:
        return None
    answer = json.loads(row[4])
    return str(answer.get("model", "")), answer["labels"]


def score(database: sqlite3.Connection, stream: str) -> tuple[int, int]:
    """Return how many labels came for the answers that are kept, and how many of the answers were right."""
    query = "select answer, right from answers where stream = ? and right is not null"
    rows = [(len(json.loads(answer)["labels"]), right) for answer, right in database.execute(query, [stream])]
    return sum(labelled for labelled, _ in rows), sum(right for _, right in rows)


def delete_damaged(database: sqlite3.Connection, stream: str) -> None:
    for number in list(damaged_answers(database, stream)):
        database.execute("delete from answers where stream = ? and number = ?", [stream, number])


def _check(row: tuple[object, ...]) -> None:
    if hash_row(row[:-1]) != row[-1]:
        problem = f"the stored answer to batch {row[1]} is damaged"
        raise DamagedStreamError(f"{problem}; reset the stream, or delete it")
