"""Draw the figure of a grid of a plan."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .figures import Curve, Drawing, bars, heatmaps, lines
from .metrics import rolling
from .plan import Grid, Plan
from .tables import Found, Table, best

X_NAMES = {
    "views": "augmented views N",
    "max_operators": "operators per view, at most",
    "eps": "budget ε, of 255",
    "draws": "draws of the views per attack step, K",
    "batch": "images in a batch",
    "tau": "threshold τ",
    "kappa": "slope κ",
    "alpha_attacked": "α of attacked images",
    "alpha_clean": "α of clean images",
}


def drawing(plan: Plan, number: int, found: Sequence[Found], table: Table) -> Drawing | None:
    """Return the figure of a grid; None if the grid has none or no run is done."""
    grid = plan.grids[number]
    mine = [(cell, row) for cell, row in found if cell.grid == number]
    if not mine or grid.figure not in KINDS:
        return None
    labels = dict.fromkeys(cell.row.label for cell, _ in mine)  # each with the settings that its table shows
    shown = [run for label in labels for run in best(grid, [(c, r) for c, r in mine if c.row.label == label])]
    return KINDS[grid.figure](grid, shown, table)


def _bars(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw accuracy by row and rate, averaged over several targets."""
    several = len({cell.target for cell, _ in found}) > 1
    columns = [i for i, name in enumerate(table.columns) if not several or name.startswith("average")]
    names = [table.columns[i].removeprefix("average, ") for i in columns]
    groups = [label for label, _ in table.rows]
    series = {name: [entries[i].mean for _, entries in table.rows] for i, name in zip(columns, names, strict=True)}
    spread = {name: [entries[i].std for _, entries in table.rows] for i, name in zip(columns, names, strict=True)}
    return bars(groups, series, spread=spread, title=table.title)


def _lines(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw accuracy over what the grid varies, or else over the rate, with a curve for each row."""
    place = next((place for place in grid.vary if place not in grid.best_of), None)
    name = "attack_rate" if place is None else place.rpartition(".")[2]
    curves: dict[str, list[Found]] = {}
    for cell, row in found:
        rate = f", {cell.attack_rate:g} %" if place and len({c.attack_rate for c, _ in found}) > 1 else ""
        where = f" on {cell.target}" if len({c.target for c, _ in found}) > 1 else ""
        curves.setdefault(f"{cell.row.label}{where}{rate}", []).append((cell, row))
    drawn = {label: _curve(runs, place, "accuracy") for label, runs in curves.items()}
    second = None
    if name == "views":
        second = ("ms per step", {"step time": _curve(found, place, "ms_per_step")})
    title = table.title if table.title != name else ""
    x = X_NAMES.get(name, "attacked, % of each batch")
    return lines(drawn, x=x, title=title, second=second, logarithmic=name == "batch")


def _curve(runs: Sequence[Found], place: str | None, figure: str) -> Curve:
    values: dict[float, list[float]] = {}
    for cell, row in runs:
        x = cell.attack_rate if place is None else float(cell.varied[place])
        values.setdefault(x, []).append(row[figure])
    order = sorted(values)
    spread = [statistics.stdev(values[x]) if len(values[x]) > 1 else 0.0 for x in order]
    return Curve(order, [statistics.mean(values[x]) for x in order], spread if any(spread) else None)


def _rolling(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw the accuracy of the last batches over the stream, at the highest rate, as the mean over seeds."""
    rate = max(cell.attack_rate for cell, _ in found)
    curves: dict[str, list[list[float]]] = {}
    for cell, row in found:
        if cell.attack_rate == rate:
            where = f" on {cell.target}" if len({c.target for c, _ in found}) > 1 else ""
            curves.setdefault(f"{cell.row.label}{where}", []).append(rolling(row["batch_accuracy"]))
    drawn = {}
    for label, runs in curves.items():
        length = min(map(len, runs))
        means = [statistics.mean(run[i] for run in runs) for i in range(length)]
        drawn[label] = Curve(list(range(1, length + 1)), means)
    return lines(drawn, x="batch", y="accuracy of the last 16 batches, %", title=f"{table.title}, {rate:g} % attacked")


def _heatmap(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw accuracy over two varied places, with a panel for each rate."""
    first, second = (place for place in grid.vary if place not in grid.best_of)
    values: dict[tuple[str, float, Any, Any], list[float]] = {}
    for cell, row in found:
        place = (cell.target, cell.attack_rate, cell.varied[first], cell.varied[second])
        values.setdefault(place, []).append(row["accuracy"])
    down, across = (sorted({key[i] for key in values}) for i in (2, 3))
    panels = {}
    for target, rate in sorted({key[:2] for key in values}):
        cells = [[values.get((target, rate, a, b)) for b in across] for a in down]
        means = [[None if c is None else statistics.mean(c) for c in line] for line in cells]
        panels[f"{target}, {rate:g} % attacked"] = means
    names = [X_NAMES.get(place.rpartition(".")[2], place) for place in (first, second)]
    return heatmaps(panels, across=(names[1], across), down=(names[0], down))


KINDS = {"bars": _bars, "lines": _lines, "rolling": _rolling, "heatmap": _heatmap}
