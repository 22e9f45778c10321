"""Rows on disk: one JSON line for each run, in a file that is named as the run is.

A file is written whole or not at all, so processes that share a store neither lose nor double a row. The files in the
folder say whether a run is not started, incomplete or done. `query` asks all rows at once, in SQL.
"""

import csv
import io
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .._internal.files import atomic_write
from ..data.store import digest, read_json
from ..errors import MissingPackageError, StoreError

Row = dict[str, Any]
SLIM = (
    "run", "dataset", "target", "source", "method", "norm", "options", "predictor", "predictor_options", "attack",
    "eps", "threat", "attack_rate", "order", "draw", "batch", "images", "seed", "accuracy", "accuracy_clean",
    "accuracy_attacked", "flagged_clean", "flagged_attacked", "nll", "ece", "ms_per_step",
    "device", "precision", "stream", "version",
)  # fmt: skip
POISONED = ("tail", "accuracy_benign", "accuracy_tail")  # columns of rows in which somebody poisons others
# Fields that differ between two executions of the same run; rows are compared without them.
TIMING = ("ms_per_step", "images_per_s", "peak_mb", "device", "threads", "versions", "check")


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def progress(self, name: str) -> Path:
        """Return the file in which an unfinished run keeps what it needs to resume."""
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
        """Return a row, and refuse a file that is not what was written there."""
        path = self.path(name)
        row = read_json(path)
        if not isinstance(row, dict) or row.get("run") != name or row.get("check") != digest(without(row, ("check",))):
            raise StoreError(f"{path} is damaged: it is not what was written there. Remove it to make the run again")
        return row

    def rows(self, names: Iterable[str] | None = None) -> list[Row]:
        """Return the rows that exist, of these runs or of all."""
        wanted = self._names() if names is None else names
        return [self.row(name) for name in wanted if self.path(name).exists()]

    def _names(self) -> list[str]:
        """Return the names of files that are rows; other files in the folder are left alone."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl") if re.fullmatch(r"[0-9a-f]{16}", path.stem))

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL on the table `rows`, such as "select method, avg(accuracy) from rows group by 1"."""
        try:
            import duckdb
        except ImportError as error:
            raise MissingPackageError("queries need duckdb: pip install 'safer-tta[bench]'") from error
        files = [str(self.path(name)) for name in self._names()]
        if not files:
            raise StoreError(f"{self.folder} has no rows yet; make some with `safer bench` or `safer run`")
        with duckdb.connect() as database:
            options = "format='newline_delimited', union_by_name=true, maximum_object_size=2097152"
            database.execute(f"create table rows as select * from read_json(?, {options})", [files])
            return list(database.execute(sql).fetchall())


def without(row: Row, fields: Collection[str] = TIMING) -> Row:
    """Return a row without fields that do not concern the result."""
    return {key: value for key, value in row.items() if key not in fields}


def slim_columns(rows: Iterable[Row]) -> list[str]:
    """Return the columns that slim rows have."""
    return [*SLIM, *(POISONED if any("accuracy_benign" in row for row in rows) else ())]


def slim_csv(rows: Iterable[Row]) -> str:
    """Return rows as CSV with the columns that tables need; options are JSON and hold only what is not a default."""
    text, rows = io.StringIO(), list(rows)
    writer = csv.DictWriter(text, slim_columns(rows), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        described = {**row, "version": str(row["versions"].get("safer_tta", ""))}
        writer.writerow({name: _cell(value) for name, value in described.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, separators=(",", ":")) if value else ""
    return f"{value:.6g}" if isinstance(value, float) else value
