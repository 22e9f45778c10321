"""Write the rows of a store as one of the slim CSV files in docs/results, from which pages take their figures.

python tools/slim_rows.py demo/bench docs/results/norms.csv

Budgets are in 255ths, a threat holds only what differs from its attack's defaults, and there is no time in it: runs
of several workers share a machine.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from safer_tta.attacks import full_threat
from safer_tta.bench.results import Results, Row, slim_columns

DIGITS = {"nll": 4, "ece": 4}  # others have two


def slim(row: Row, columns: list[str]) -> dict[str, Any]:
    found = {name: row.get(name) for name in columns} | {"ms_per_step": None, "version": row["versions"]["safer_tta"]}
    if row["attack"]:
        threat = row["threat"] or {}
        budget = {name: threat[name] for name in ("eps", "norm") if name in threat}
        usual = full_threat(row["attack"], **budget)
        found["eps"] = round(255 * budget["eps"], 3) if budget else None
        found["threat"] = {name: value for name, value in threat.items() if value != usual.get(name)}
    return {name: _cell(name, value) for name, value in found.items()}


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, separators=(",", ":")) if value else ""
    if isinstance(value, float):
        short = f"{value:.{DIGITS.get(name, 2)}f}"
        return f"{value:g}" if name in ("eps", "attack_rate") else short
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="the folder that `safer bench` wrote to")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found = Results(given.store / "runs").rows()
    columns = slim_columns(found)
    rows = sorted((slim(row, columns) for row in found), key=lambda row: tuple(map(str, row.values()))[1:])
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
