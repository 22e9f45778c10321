"""Rows of measurements as CSV, in the form of docs/results/speed.csv, soak.csv and serve.csv."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def append(path: Path, fields: Sequence[str], row: Mapping[str, Any]) -> None:
    """Add a row to a file, with a header if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow({name: _text(value) for name, value in row.items()})


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, or none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def machine() -> str:
    """Return the name of what measures."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
