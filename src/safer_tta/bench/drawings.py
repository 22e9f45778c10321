"""Draw the figure of a grid of a plan."""

import statistics
from collections.abc import Sequence

from ..evaluation.metrics import rolling
from .figures import Curve, Drawing, bars, heatmaps, lines
from .plan import Cell, Grid, Plan
from .tables import Found, Table, best, grouped

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
    runs = grouped((cell.row.label, (cell, row)) for cell, row in found if cell.grid == number)
    if not runs or grid.figure not in KINDS:
        return None
    shown = [run for mine in runs.values() for run in best(grid, mine)]  # with the settings that the table shows
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
    several = place is not None and len({cell.attack_rate for cell, _ in found}) > 1
    curves = grouped(
        (_named(cell, found) + (f", {cell.attack_rate:g} %" if several else ""), (cell, row)) for cell, row in found
    )
    drawn = {label: _curve(runs, place, "accuracy") for label, runs in curves.items()}
    second = ("ms per step", {"step time": _curve(found, place, "ms_per_step")}) if name == "views" else None
    title = table.title if table.title != name else ""
    x = X_NAMES.get(name, "attacked, % of each batch")
    return lines(drawn, x=x, title=title, second=second, logarithmic=name == "batch")


def _named(cell: Cell, found: Sequence[Found]) -> str:
    """Return a run's label, with its target if there are several."""
    return cell.row.label + (f" on {cell.target}" if len({c.target for c, _ in found}) > 1 else "")


def _curve(runs: Sequence[Found], place: str | None, figure: str) -> Curve:
    values = grouped(
        (cell.attack_rate if place is None else float(cell.varied[place]), row[figure]) for cell, row in runs
    )
    order = sorted(values)
    spread = [statistics.stdev(values[x]) if len(values[x]) > 1 else 0.0 for x in order]
    return Curve(order, [statistics.mean(values[x]) for x in order], spread if any(spread) else None)


def _rolling(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw the accuracy of the last batches over the stream, at the highest rate, as the mean over seeds."""
    rate = max(cell.attack_rate for cell, _ in found)
    shown = [(cell, row) for cell, row in found if cell.attack_rate == rate]
    curves = grouped((_named(cell, found), rolling(row["batch_accuracy"])) for cell, row in shown)
    drawn = {}
    for label, runs in curves.items():
        means = [statistics.mean(values) for values in zip(*runs, strict=False)]  # as long as the shortest run
        drawn[label] = Curve(list(range(1, len(means) + 1)), means)
    return lines(drawn, x="batch", y="accuracy of the last 16 batches, %", title=f"{table.title}, {rate:g} % attacked")


def _heatmap(grid: Grid, found: Sequence[Found], table: Table) -> Drawing:
    """Draw accuracy over two varied places, with a panel for each rate."""
    first, second = (place for place in grid.vary if place not in grid.best_of)
    values = grouped(
        ((cell.target, cell.attack_rate, cell.varied[first], cell.varied[second]), row["accuracy"])
        for cell, row in found
    )
    down, across = (sorted({key[i] for key in values}) for i in (2, 3))
    panels = {}
    for target, rate in sorted({key[:2] for key in values}):
        cells = [[values.get((target, rate, a, b)) for b in across] for a in down]
        means = [[None if c is None else statistics.mean(c) for c in line] for line in cells]
        panels[f"{target}, {rate:g} % attacked"] = means
    names = [X_NAMES.get(place.rpartition(".")[2], place) for place in (first, second)]
    return heatmaps(panels, across=(names[1], across), down=(names[0], down))


KINDS = {"bars": _bars, "lines": _lines, "rolling": _rolling, "heatmap": _heatmap}
