"""Compute the figures and tables that pages show from the rows in docs/results.

`python docs/facts.py` writes docs/results/facts.json and the marked blocks of README.md; tests/docs/test_facts.py
checks that both are up to date. docs/tables.py declares what is computed. A page shows a whole table as
`{{ table: pacs-main }}`, one cell of it as `{{ pacs-main / Tent + SAFER / clean }}` and the seeds behind it as
`{{ pacs-main / seeds }}`.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safer_tta.evaluation.intervals import wilson

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
FACTS = RESULTS / "facts.json"
MISSING = "–"
BLOCK = re.compile(r"(<!-- facts: (.+?) -->).*?(<!-- /facts -->)", re.DOTALL)
STUDENT = {2: 4.303, 4: 2.776, 8: 2.306, 12: 2.179}  # the 97.5 % quantiles of Student's t, by degrees of freedom

Row = Mapping[str, str]
Where = Mapping[str, str | tuple[str, ...]]  # the value a column must have, or the values it may have
Facts = dict[str, dict[str, str]]


@functools.cache
def read(file: str) -> list[Row]:
    """Return the rows of docs/results/<file>.csv."""
    with (RESULTS / f"{file}.csv").open(newline="") as opened:
        return list(csv.DictReader(opened))


def select(rows: Iterable[Row], where: Where) -> list[Row]:
    """Return the rows whose columns have the values asked for."""

    def fits(row: Row) -> bool:
        return all(row[k] in v if isinstance(v, tuple) else row[k] == v for k, v in where.items())

    return [row for row in rows if fits(row)]


@dataclass(frozen=True)
class Table:
    """Mean accuracies over targets and seeds, for rows by columns.

    Attributes:
        file: The CSV file in docs/results.
        rows: What each row of the table selects.
        columns: What each column selects besides.
        base: What every cell selects.
        targets: The targets a cell averages over, unless it selects one.
        seeds: The seeds a cell averages over, unless it selects some. Empty: all that every cell has.
        spread: What is added: "interval" is a 95 % confidence interval over seeds, "deviation" the standard deviation
            over seeds, and "images" the 95 % confidence interval of one seed over the images that `base` selects.
        complete: Whether a cell without measurements is an error; otherwise it is shown as missing.
        upright: Whether the Markdown has a line for every column, for tables with many columns.
        measure: The field that is averaged: the accuracy on all images, or on the clean or the attacked ones.
    """

    file: str
    rows: Mapping[str, Where]
    columns: Mapping[str, Where]
    base: Where = field(default_factory=dict)
    targets: Sequence[str] = ("art_painting", "cartoon", "photo", "sketch")
    seeds: Sequence[str] = ()
    spread: str = ""
    complete: bool = True
    upright: bool = False
    measure: str = "accuracy"

    def make(self) -> tuple[dict[str, str], str]:
        """Return the table's facts and its Markdown."""
        found = {(row, column): self._cell(row, column) for row in self.rows for column in self.columns}
        common = [set(found[row, c]) for row in self.rows for c, where in self.columns.items() if "seed" not in where]
        seeds = self.seeds or sorted(set.intersection(*filter(None, common)))
        if not seeds:
            raise ValueError(f"no seed has every cell of {list(self.rows)} in {self.file}.csv")
        facts, lines = {"seeds": listed(seeds)}, []
        for row in self.rows:
            shown = []
            for column in self.columns:
                own = self.columns[column].get("seed", seeds)
                mean, spread = self._average(found[row, column], [own] if isinstance(own, str) else own)
                facts[f"{row} / {column}"] = mean
                shown.append(mean + spread)
            lines.append([row, *shown])
        heading = "accuracy, %" if self.measure.startswith("accuracy") else "share, %"
        shown_lines = [[heading, *self.columns], *lines]
        if self.upright:
            shown_lines = list(map(list, zip(*shown_lines, strict=True)))
        return facts, markdown(shown_lines[0], shown_lines[1:])

    def _cell(self, row: str, column: str) -> dict[str, list[float]]:
        """Return {seed: the accuracy on every target}, of seeds that have all targets."""
        where = {**self.base, **self.rows[row], **self.columns[column]}
        found = select(read(self.file), where)
        targets = [str(where["target"])] if "target" in where else self.targets
        places = {(line["seed"], line["target"]): float(line[self.measure]) for line in found}
        if len(places) < len(found):
            raise ValueError(f"{self.file}.csv has more than one row of a seed and target for {row!r}, {column!r}")
        seeds = sorted({seed for seed, _ in places if all((seed, target) in places for target in targets)})
        if not seeds and self.complete:
            raise ValueError(f"{self.file}.csv has no rows for {row!r}, {column!r}")
        return {seed: [places[seed, target] for target in targets] for seed in seeds}

    def _average(self, cell: Mapping[str, Sequence[float]], seeds: Sequence[str]) -> tuple[str, str]:
        """Return the mean over targets and seeds and its spread, as text."""
        if not set(seeds) <= set(cell):
            return MISSING, ""
        mean = f"{statistics.mean(statistics.mean(cell[seed]) for seed in seeds):.1f}"
        if self.spread == "deviation":
            return mean, f" ± {statistics.stdev(statistics.mean(cell[seed]) for seed in seeds):.1f}"
        if self.spread == "images":
            ((accuracy,),) = (cell[seed] for seed in seeds)
            low, high = wilson(accuracy, int(str(self.base["images"])))
            return mean, f" [{low:.1f}, {high:.1f}]"
        by_target = list(zip(*(cell[seed] for seed in seeds), strict=True))
        return mean, f" ± {half_interval(by_target):.1f}" if self.spread else ""


def half_interval(by_target: Sequence[Sequence[float]]) -> float:
    """Half of the 95 % confidence interval of the mean over targets.

    The targets are fixed. Every seed trains models of its own for every target, so errors are independent and each
    target with n seeds gives n - 1 degrees of freedom.
    """
    targets, seeds = len(by_target), len(by_target[0])
    variance = sum(statistics.variance(values) for values in by_target) / (targets**2 * seeds)
    return float(STUDENT[targets * (seeds - 1)] * variance**0.5)


@dataclass(frozen=True)
class Listing:
    """Rows of a CSV file as they are.

    Attributes:
        file: The CSV file in docs/results.
        columns: The heading of every column and the field it shows.
        where: Which rows to show.
        keys: How many of the first columns name a row.
        digits: Decimal places of numbers that have some.
    """

    file: str
    columns: Mapping[str, str]
    where: Where = field(default_factory=dict)
    keys: int = 1
    digits: int = 1

    def make(self) -> tuple[dict[str, str], str]:
        """Return the listing's facts and its Markdown."""
        facts, lines = {}, []
        for row in select(read(self.file), self.where):
            line = [self._shown(row[name]) for name in self.columns.values()]
            label = ", ".join(line[: self.keys])
            for heading, value in list(zip(self.columns, line, strict=True))[self.keys :]:
                if f"{label} / {heading}" in facts:
                    raise ValueError(f"two rows of {self.file}.csv are called {label!r}")
                facts[f"{label} / {heading}"] = value
            lines.append(line)
        return facts, markdown(list(self.columns), lines)

    def _shown(self, value: str) -> str:
        number = re.fullmatch(r"-?\d+\.\d+", value)
        return (f"{float(value):.{self.digits}f}" if number else value) or MISSING


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def listed(names: Sequence[str]) -> str:
    """Return names as a phrase: "0, 1 and 2"."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def build() -> Facts:
    """Compute {"cells": {key: text}, "tables": {key: Markdown}} from the rows."""
    from tables import TABLES

    facts: Facts = {"cells": {}, "tables": {}}
    for name, table in TABLES.items():
        cells, facts["tables"][name] = table.make()
        facts["cells"] |= {f"{name} / {key}": value for key, value in cells.items()}
    return facts


def filled(page: str, facts: Facts) -> str:
    """Return a page with the tables and cells of these facts between its markers."""

    def block(found: re.Match[str]) -> str:
        key = found[2]
        text = f"\n{facts['tables'][key]}\n" if key in facts["tables"] else facts["cells"][key]
        return f"{found[1]}{text}{found[3]}"

    return BLOCK.sub(block, page)


def main() -> None:
    facts = build()
    FACTS.write_text(json.dumps(facts, indent=0, ensure_ascii=False, sort_keys=True) + "\n")
    README.write_text(filled(README.read_text(), facts))


if __name__ == "__main__":
    main()
