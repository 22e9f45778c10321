"""Draw the pictures of the pages from the same cells as their tables: `python docs/figures.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from facts import FACTS, MISSING, RESULTS
from tables import TABLES

from safer_tta.bench.figures import Curve, bars, lines

Cells = Mapping[str, str]


def values(cells: Cells, table: str, row: str) -> dict[str, float]:
    """Return {column: accuracy} of a row, without what was not measured."""
    found = {column: cells[f"{table} / {row} / {column}"] for column in TABLES[table].columns}
    return {column: float(text) for column, text in found.items() if text != MISSING}


def curves(cells: Cells, table: str, x: Mapping[str, float], rows: list[str]) -> dict[str, Curve]:
    """Return a row of a table as a curve over x, which has a value for every column."""
    found = {row: values(cells, table, row) for row in rows}
    return {row: Curve([x[c] for c in line], list(line.values())) for row, line in found.items()}


def main() -> None:
    cells = json.loads(FACTS.read_text())["cells"]
    columns = {name: list(TABLES[name].columns) for name in ("pacs-main", "pacs-rates", "pacs-epsilon", "pacs-eot")}
    main_rows = ["no adaptation", *(f"Tent{end}" for end in ("", " + SAFER", " + SAFER-A", " + SAFER-G"))]
    heights = {rate: [values(cells, "pacs-main", row)[rate] for row in main_rows] for rate in columns["pacs-main"]}
    rate = {column: float(column.removesuffix(" %")) for column in columns["pacs-rates"]}
    budget = {column: float(column.partition("/")[0]) for column in columns["pacs-epsilon"]}
    draws = dict(zip(columns["pacs-eot"], (0.0, 1.0, 4.0, 8.0), strict=True))
    size = {"batches of 64": 64.0, "batches of 16": 16.0, "batches of 4": 4.0, "single images": 1.0}
    around = ["Tent + SAFER", "Tent + SAFER-A", "Tent + SAFER-G"]
    drawn = {
        "pacs-main": bars(main_rows, heights),
        "pacs-rates": lines(
            curves(cells, "pacs-rates", rate, [*main_rows[1:], "SAFER's views, no adaptation"]), x="attacked images, %"
        ),
        "pacs-epsilon": lines(
            curves(cells, "pacs-epsilon", budget, ["Tent", "Tent + SAFER", "Tent + SAFER-G"]),
            x="budget, 255ths",
            logarithmic=True,
        ),
        "pacs-eot": lines(
            curves(cells, "pacs-eot", draws, around), x="draws of the views per attack step; 0: transferred"
        ),
        "norms-clean": lines(
            curves(cells, "norms-clean", size, list(TABLES["norms-clean"].rows)),
            x="images in a batch",
            logarithmic=True,
        ),
    }
    for name, drawing in drawn.items():
        (RESULTS / f"{name}.svg").write_text(drawing.svg + "\n")


if __name__ == "__main__":
    main()
