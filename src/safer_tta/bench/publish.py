"""Tables, figures and one page of a plan, made from its rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._internal.safetensors_io import atomic_write
from ..data.store import digest
from ..errors import StoreError
from ..training import Recipe
from . import report, tables
from .drawings import drawing
from .experiment import Experiment, count_views
from .figures import Drawing
from .plan import Cell, Plan
from .qualitative import one_attacked_image
from .results import slim_csv
from .tables import Found, Table
from .tasks import Place, Task, materials, surrogate_facts

SHOWN_BATCHES = 6  # adapted to before an image is chosen for the picture
NOT_SHOWN = "No image of this stream is saved by its views."


@dataclass(frozen=True)
class Study:
    """A plan on a dataset."""

    name: str  # the plan's name
    plan: Plan
    dataset: str
    cells: Sequence[Cell]
    tasks: Sequence[Task]  # the tasks that they take
    runs: Sequence[str]  # the names of their runs, cell by cell
    command: str = ""  # the command that made it
    # whether it is neither quick nor an excerpt, so that the paper's figures may stand beside its own
    whole: bool = True

    @property
    def folder(self) -> str:
        """The name of its folder: a quick study does not overwrite a real one."""
        return f"{self.name}-{self.dataset}-{digest({'runs': sorted(set(self.runs))})[:6]}"

    def found(self, place: Place) -> tuple[list[Found], list[str]]:
        """Return the rows that exist with their cells, and what is wrong with those that cannot be read."""
        found, problems = [], []
        for cell, name in zip(self.cells, self.runs, strict=True):
            try:
                if place.results.state(name) == "done":
                    found.append((cell, place.results.row(name)))
            except StoreError as error:
                problems.append(str(error))
        return found, list(dict.fromkeys(problems))

    def tabulated(self, found: Sequence[Found]) -> list[Table]:
        """Return a table for every grid. Only a whole study is compared with the paper."""
        return tables.tables(self.plan, found, self.dataset if self.whole else "", self.cells)


def publish(study: Study, place: Place, failed: Mapping[str, str] = {}, *, pictures: bool = True) -> Path:
    """Write tables (Markdown, LaTeX, CSV), figures (SVG, PNG), rows (JSON Lines, CSV) and the page.

    Args:
        study: The plan on its data.
        place: Where its rows lie.
        failed: What went wrong, by label.
        pictures: Whether to adapt once more to show one image's views, where the plan asks for that.

    Returns:
        The path of the page.
    """
    folder = place.store / "reports" / study.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("figure-*"):
        old.unlink()
    found, problems = study.found(place)
    made = study.tabulated(found)
    drawings = [drawing(study.plan, number, found, table) for number, table in enumerate(made)]
    _write(folder / "rows.jsonl", "".join(json.dumps(row, sort_keys=True) + "\n" for row in _distinct(found)))
    _write(folder / "rows.csv", slim_csv(_distinct(found)))
    _write(folder / "tables.md", markdown(study, made))
    _write(folder / "tables.tex", "\n".join(tables.latex(table) for table in made))
    _write(folder / "tables.csv", tables.comma_separated(made))
    for number, drawn in enumerate(drawings):
        if drawn is not None:
            _write(folder / f"figure-{number}.svg", drawn.svg)
            _write(folder / f"figure-{number}.png", drawn.png)
    shown = _pictures(study, place) if pictures else []
    page = _page(study, place, found, made, drawings, shown, {**failed, **dict.fromkeys(problems, "damaged row")})
    _write(folder / "report.html", page)
    return folder / "report.html"


def _write(path: Path, content: str | bytes) -> None:
    with atomic_write(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _distinct(found: Sequence[Found]) -> list[dict[str, Any]]:
    return list({row["run"]: row for _, row in found}.values())


def markdown(study: Study, made: Sequence[Table]) -> str:
    """Return a plan's tables, compared with the paper's where it has them."""
    parts = [f"# {study.plan.title}", study.plan.about, f"`{study.command}`" if study.command else ""]
    for table in made:
        parts += [f"## {table.title}", tables.markdown(table)]
        if table.compared:
            parts += ["### Beside the paper's figures", _unlike(study), tables.beside_the_paper(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _pictures(study: Study, place: Place) -> list[report.View]:
    """Return the views of one attacked image, where the plan asks for them and its stream has been made."""
    if not any(grid.figure == "pictures" for grid in study.plan.grids):
        return []
    for task in study.tasks:
        if task.kind == "run" and task.done(place):
            experiment = Experiment.from_description(task.definition)
            if count_views(experiment) and experiment.copies():
                return one_attacked_image(experiment, materials(experiment, place), SHOWN_BATCHES)
    return []


# --- the page -------------------------------------------------------------------------------------------------------


def _page(
    study: Study,
    place: Place,
    found: Sequence[Found],
    made: Sequence[Table],
    drawings: Sequence[Drawing | None],
    shown: Sequence[report.View],
    failed: Mapping[str, str],
) -> str:
    sections = [report.paragraph(study.plan.about)] if study.plan.about else []
    sections.append(report.paragraph(_summary(study, found)))
    if failed:
        sections.append(report.section("What went wrong", *(report.paragraph(f"{k}: {v}") for k, v in failed.items())))
    for table, drawn in zip(made, drawings, strict=True):
        content = [_sortable(table)]
        if drawn is not None:
            content.append(report.charts((drawn.svg, f"figure: {table.title}")))
        if table.compared:
            content += [report.paragraph(f"Beside the paper's figures. {_unlike(study)}"), _compared(table)]
        sections.append(report.section(table.title, *content))
    if shown:
        sections.append(report.section("One attacked image", report.views(shown)))
    elif any(grid.figure == "pictures" for grid in study.plan.grids):
        sections.append(report.section("One attacked image", report.paragraph(NOT_SHOWN)))
    sections += _closing(study, place, found)
    return report.page(f"{study.plan.title}: {study.dataset}", *sections)


def _unlike(study: Study) -> str:
    """Return what differs between our runs and the paper's."""
    recipes = [task.definition["recipe"] for task in study.tasks if task.kind == "source"]
    full = [Recipe(**{**recipe, "weights": None}) for recipe in recipes]
    ours = sorted({f"{recipe.architecture}, {recipe.steps} training steps" for recipe in full})
    hardened = {f" Robust ERM with {recipe.attack['steps']} attack steps." for recipe in full if recipe.attack}
    return f"Ours: {'; '.join(ours)}, normalised images. The paper: resnet18, 5000 steps, without.{''.join(hardened)}"


def _summary(study: Study, found: Sequence[Found]) -> str:
    seeds = sorted({cell.seed for cell in study.cells})
    return (
        f"{len(found)} of {len(study.cells)} runs are done. Accuracy in %, mean ± standard deviation over "
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}; best bold, second underlined. Click a column's head to sort by it."
    )


def _sortable(table: Table) -> str:
    rows = []
    for label, entries in table.rows:
        values = []
        for entry, (best, second) in zip(entries, table.ranks(), strict=True):
            place = None if entry.mean is None else round(entry.mean, 1)
            mark = "" if place is None else "best" if place == best else "second" if place == second else ""
            values.append(report.Value(entry.mean, tables.plain(entry), mark))
        rows.append((label, values))
    return report.sortable(["accuracy, %", *table.columns], rows)


def _compared(table: Table) -> str:
    rows = []
    for label, entries in table.rows:
        for column, entry in zip(table.columns, entries, strict=True):
            if entry.paper:
                gap = None if entry.mean is None or entry.paper.note else entry.mean - entry.paper.mean
                values = [
                    report.Value(entry.mean, tables.plain(entry)),
                    report.Value(entry.paper.mean, f"{entry.paper.mean:.1f}"),
                    report.Value(gap, tables.difference(entry)),
                ]
                rows.append((f"{label}, {column}", values))
    return report.sortable(["row", "ours", "paper", "difference"], rows)


def _closing(study: Study, place: Place, found: Sequence[Found]) -> Iterator[str]:
    """Yield the sections on cost, settings and how to repeat the study."""
    if found:
        lines = [
            (label, [report.Value(value, f"{value:.1f}") for value in figures.values()])
            for label, figures in tables.cost(found)
        ]
        yield report.section("Cost", report.sortable(["run", "ms per step", "images per s", "peak MB"], lines))
    settings = []
    facts = surrogate_facts(study.tasks, place)
    if facts:
        clean, fooled = (statistics.mean(fact[key] for fact in facts) for key in _SURROGATE)
        settings.append(f"The attacker's own models: {clean:.1f} % on clean images, {fooled:.2f} % on attacked ones.")
    for row in _distinct(found)[:1]:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        settings.append(f"Measured on {row['device']}, {row['threads']} threads, {row['precision']}; {versions}.")
    sources = {json.dumps(t.definition["recipe"], sort_keys=True) for t in study.tasks if t.kind == "source"}
    for recipe in sorted(sources)[:6]:
        listed = ", ".join(f"{key} {value}" for key, value in json.loads(recipe).items())
        settings.append(f"Source model: {listed or 'the defaults of a recipe'}.")
    yield report.section("Settings", *(report.paragraph(line) for line in settings))
    if study.command:
        yield report.section("Do it again", f"<p><code>{report.escaped(study.command)}</code></p>")


_SURROGATE = ("surrogate_clean", "surrogate_attacked")
