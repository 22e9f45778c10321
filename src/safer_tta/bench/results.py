"""Rows on disk: one JSON line a run, in a file named by the hash of what defines the run.

A file is written whole or not at all, so processes that share a store neither lose nor double a row, and a run is not
started, incomplete or done by what lies in the folder. `query` asks all rows at once, in SQL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..data.store import StoreError, digest, read_json
from ..tensorfile import atomic_write

Row = dict[str, Any]
# Fields that differ between two executions of the same run; rows are compared without them.
TIMING = ("ms_per_step", "images_per_s", "peak_mb", "device", "threads", "versions", "check")


class Results:
    """The rows of a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def progress(self, name: str) -> Path:
        """Where a run that is under way keeps what it needs to go on."""
        return self.folder / f"{name}.progress"

    def state(self, name: str) -> str:
        if self.path(name).exists():
            return "done"
        return "incomplete" if self.progress(name).exists() else "not started"

    def write(self, row: Row) -> Row:
        row = json.loads(json.dumps(row))  # as it will be read
        row["check"] = digest(row)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path(row["run"])) as file:
            file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
        self.progress(row["run"]).unlink(missing_ok=True)
        return row

    def row(self, name: str) -> Row:
        """A row as it was written; anything else is refused by name."""
        path = self.path(name)
        row = read_json(path)
        if not isinstance(row, dict) or row.get("run") != name or row.get("check") != digest(without(row, ("check",))):
            raise StoreError(
                f"{path} is damaged: it is not what was written there. Remove it to have the run made again"
            )
        return row

    def rows(self, names: Iterable[str] | None = None) -> list[Row]:
        """The rows that are there, of these runs or of all."""
        wanted = self._names() if names is None else names
        return [self.row(name) for name in wanted if self.path(name).exists()]

    def _names(self) -> list[str]:
        """Files that are rows by their name; whatever else lies in the folder is not ours."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl") if re.fullmatch(r"[0-9a-f]{16}", path.stem))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """SQL over the table `rows`: results.query("select method, avg(accuracy) from rows group by 1")."""
        try:
            import duckdb
        except ImportError as error:
            raise ImportError("queries need duckdb: pip install 'safer-tta[bench]'") from error
        files = [str(self.path(name)) for name in self._names()]
        if not files:
            raise StoreError(f"{self.folder} holds no rows yet")
        with duckdb.connect() as database:
            options = "format='newline_delimited', union_by_name=true, maximum_object_size=2097152"
            database.execute(f"create table rows as select * from read_json(?, {options})", [files])
            return list(database.execute(sql).fetchall())


def without(row: Row, fields: Iterable[str] = TIMING) -> Row:
    """A row without fields that say nothing about the result."""
    left_out = set(fields)
    return {key: value for key, value in row.items() if key not in left_out}
