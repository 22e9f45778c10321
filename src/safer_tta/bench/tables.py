"""Tables of a plan: means over seeds with their spread and their interval, the best bold and the second underlined."""

import csv
import dataclasses
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..data.domains import KNOWN
from ..evaluation.intervals import interval
from .paper import AVERAGE, Published, published
from .plan import Cell, Grid, Plan
from .results import Row

Found = tuple[Cell, Row]
K = TypeVar("K")
V = TypeVar("V")
MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
HEADINGS = {
    "accuracy": "accuracy, %",
    "accuracy_clean": "accuracy on clean images, %",
    "accuracy_attacked": "accuracy on attacked images, %",
    "accuracy_benign": "accuracy on images of others, %",
    "accuracy_tail": "accuracy on the clean tail, %",
}
LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}


@dataclass(frozen=True)
class Entry:
    """A figure of a table, over seeds; its mean is None if no run is done."""

    mean: float | None = None
    std: float | None = None
    low: float | None = None  # the ends of the 95 % confidence interval, over images and seeds
    high: float | None = None
    count: int = 0
    paper: Published | None = None

    @property
    def rounded(self) -> float | None:
        """The mean as it is printed."""
        return None if self.mean is None else round(self.mean, 1)


@dataclass(frozen=True)
class Column:
    target: str
    rate: float
    varied: tuple[tuple[str, Any], ...] = ()

    def label(self, several: bool) -> str:
        """Return what tells it from the other columns."""
        settings = [f"{place.rpartition('.')[2]} {value}" for place, value in self.varied]
        return ", ".join([*([self.target] if several else []), *settings, f"{self.rate:g} %"])


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    places: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    heading: str = "accuracy, %"

    @property
    def compared(self) -> list[tuple[str, str, Entry, Published]]:
        """The row, the column and the figures of every entry that the paper published too."""
        named = [(label, column, e) for label, row in self.rows for column, e in zip(self.columns, row, strict=True)]
        return [(label, column, entry, entry.paper) for label, column, entry in named if entry.paper]

    def marked(self) -> Iterator[tuple[str, list[tuple[Entry, str]]]]:
        """Yield the label and the entries of every row, each with its mark in its column: "best", "second" or ""."""
        marks: list[dict[float | None, str]] = []
        for entries in zip(*(entries for _, entries in self.rows), strict=True):
            means = sorted({e.rounded for e in entries if e.rounded is not None}, reverse=True)
            marks.append(dict(zip(means, ("best", "second"), strict=False)) if len(self.rows) > 1 else {})
        for label, entries in self.rows:
            yield label, [(e, known.get(e.rounded, "")) for e, known in zip(entries, marks, strict=True)]


def tables(plan: Plan, found: Sequence[Found], dataset: str, planned: Sequence[Cell] = ()) -> list[Table]:
    """Return a table for every grid of a plan; averages are over the targets of all `planned` cells, done or not."""
    made = []
    for number, grid in enumerate(plan.grids):
        mine = [(cell, row) for cell, row in found if cell.grid == number]
        targets = {cell.target for cell in (*planned, *(cell for cell, _ in mine)) if cell.grid == number}
        made.append(_table(plan, grid, mine, dataset, targets))
    return made


def _table(plan: Plan, grid: Grid, found: Sequence[Found], dataset: str, targets: set[str]) -> Table:
    columns, rows = _columns(grid, found), []
    runs = grouped((cell.row.label, (cell, row)) for cell, row in found)
    for label in (row.label for row in grid.rows):
        chosen = best(grid, runs.get(label, []))
        entries = tuple(_entry(grid, column, label, chosen, dataset, targets) for column in columns)
        shown = label if not grid.best_of or not chosen else f"{label} [{_setting(grid, chosen[0][0])}]"
        rows.append((shown, entries))
    return Table(
        grid.title or plan.title,
        tuple(c.label(len(targets) > 1) for c in columns),
        tuple(columns),
        tuple(rows),
        HEADINGS[grid.show],
    )


def _columns(grid: Grid, found: Sequence[Found]) -> list[Column]:
    columns = dict.fromkeys(_column(grid, cell) for cell, _ in found)
    if len({column.target for column in columns}) > 1:
        columns |= dict.fromkeys(dataclasses.replace(column, target=AVERAGE) for column in columns)
    return sorted(columns, key=lambda column: column.rate)  # stable: the rest stays in the plan's order


def _column(grid: Grid, cell: Cell) -> Column:
    shown = tuple((place, value) for place, value in cell.varied.items() if place not in grid.best_of)
    return Column(cell.target, cell.attack_rate, shown)


def _entry(grid: Grid, column: Column, label: str, found: Sequence[Found], dataset: str, targets: set[str]) -> Entry:
    per_seed = grouped(
        (cell.seed, row)
        for cell, row in found
        if row.get(grid.show) is not None
        and (cell.attack_rate, _column(grid, cell).varied) == (column.rate, column.varied)
        and column.target in (AVERAGE, cell.target)
    )
    paper = published(grid.paper, dataset, column.target, label, dict(column.varied), column.rate)
    if column.target == AVERAGE and targets != set(KNOWN[dataset].domains if dataset in KNOWN else ()):
        paper = None  # since the paper averages over all domains
    # An average over targets needs a run on every target.
    whole = len(targets) if column.target == AVERAGE else 1
    complete = [rows for rows in per_seed.values() if len(rows) == whole]
    if not complete:
        return Entry(paper=paper)
    accuracies = [[row[grid.show] for row in rows] for rows in complete]
    means = [statistics.mean(values) for values in accuracies]
    spread = statistics.stdev(means) if len(means) > 1 else None
    ends = interval(accuracies, [_shown_images(grid, row) for row in complete[0]])
    return Entry(statistics.mean(means), spread, *ends, len(means), paper)


def _shown_images(grid: Grid, row: Row) -> int:
    """Return over how many images the figure goes that a table shows."""
    images: int = row["images"]
    if grid.show == "accuracy":
        return images
    attacked = round(images * float(row["attacked_share"]) / 100)
    tail = min(images, int(row.get("tail", 0)))
    counts: dict[str, int] = {"accuracy_attacked": attacked, "accuracy_clean": images - attacked, "accuracy_tail": tail}
    return counts.get(grid.show, images - attacked - tail)


def best(grid: Grid, found: Sequence[Found]) -> Sequence[Found]:
    """Return the runs of the setting in `best_of` with the highest mean accuracy, among those with the most runs."""
    if not grid.best_of or not found:
        return found
    settings = grouped((_setting(grid, cell), (cell, row)) for cell, row in found)
    furthest = max(map(len, settings.values()))
    complete = [runs for runs in settings.values() if len(runs) == furthest]
    return max(complete, key=lambda runs: statistics.mean(row["accuracy"] for _, row in runs))


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Collect the values of each key."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _setting(grid: Grid, cell: Cell) -> str:
    return ", ".join(f"{place.rpartition('.')[2]} {cell.varied[place]}" for place in grid.best_of)


def markdown(table: Table) -> str:
    body = [[label, *(MARKDOWN[mark].format(plain(e)) for e, mark in row)] for label, row in table.marked()]
    return _grid([table.heading, *table.columns], body)


def latex(table: Table) -> str:
    """Return a LaTeX tabular that uses booktabs."""
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join(["Method", *map(_escaped, table.columns)]) + r" \\",
        r"\midrule",
    ]
    for label, entries in table.marked():
        cells = (LATEX[mark].format(plain(entry, r" $\pm$ ")) for entry, mark in entries)
        lines.append(" & ".join([_escaped(label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def comma_separated(made: Sequence[Table]) -> str:
    varied = list(dict.fromkeys(place for table in made for column in table.places for place, _ in column.varied))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = ["mean", "std", "low", "high", "seeds", "paper_mean", "paper_std"]
    writer.writerow(["table", "row", "target", "attack_rate", *varied, *figures])
    for table in made:
        for label, entries in table.rows:
            for column, e in zip(table.places, entries, strict=True):
                settings = [dict(column.varied).get(place) for place in varied]
                paper = (e.paper.mean, e.paper.std) if e.paper else (None, None)
                found = [e.mean, e.std, e.low, e.high, e.count, *paper]
                writer.writerow([table.title, label, column.target, column.rate, *settings, *found])
    return text.getvalue()


def beside_the_paper(table: Table) -> str:
    """Return a table of our figure, the paper's and the difference, for every published figure."""
    body = [[label, column, plain(e), f"{p.mean:.1f}", difference(e)] for label, column, e, p in table.compared]
    return _grid(["row", "column", "ours", "paper", "difference"], body)


def difference(entry: Entry) -> str:
    """Return our figure minus the paper's, if they compare."""
    if entry.mean is None or entry.paper is None:
        return "–"
    return entry.paper.note or f"{entry.mean - entry.paper.mean:+.1f}"


def cost(found: Iterable[Found]) -> list[tuple[str, Mapping[str, float]]]:
    """Return the cost of every label and setting, as medians over its runs."""
    runs = grouped((", ".join([cell.row.label, *cell.settings]), row) for cell, row in found)
    keys = ("ms_per_step", "images_per_s", "peak_mb")
    medians = ({key: statistics.median(row[key] or 0.0 for row in rows) for key in keys} for rows in runs.values())
    return list(zip(runs, medians, strict=True))


def _grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in body)]) + "\n"


def plain(entry: Entry, between: str = " ± ") -> str:
    """Return a figure as it is printed."""
    if entry.mean is None:
        return "–"
    spread = "" if entry.std is None else f"{between}{entry.std:.1f}"
    return f"{entry.mean:.1f}{spread} [{entry.low:.1f}, {entry.high:.1f}]"


def _escaped(text: str) -> str:
    for sign in "&%#_":
        text = text.replace(sign, f"\\{sign}")
    return text
