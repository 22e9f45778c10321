"""Tables, figures and one page of a plan, made from its rows."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._internal.files import atomic_write
from ..data.store import digest
from ..errors import StoreError
from ..training import Recipe
from . import report, tables
from .drawings import drawing
from .experiment import Experiment
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
    whole: bool = True  # whether it is neither quick nor an excerpt, so that it compares with the paper

    @property
    def folder(self) -> str:
        """The name of its folder: a quick study does not overwrite a real one."""
        return f"{self.name}-{self.dataset}-{digest({'runs': sorted(set(self.runs))})[:6]}"

    @property
    def pictured(self) -> bool:
        return any(grid.figure == "pictures" for grid in self.plan.grids)

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


def publish(study: Study, place: Place, failed: Mapping[str, str] = {}, *, pictures: bool = True) -> Path:
    """Write tables (Markdown, LaTeX, CSV), figures (SVG, PNG), rows (JSON Lines, CSV) and the page; return its path.

    `failed` says what went wrong, by label. `pictures` adapts once more for a plan that shows one image's views.
    """
    folder = place.store / "reports" / study.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("figure-*"):
        old.unlink()
    found, problems = study.found(place)
    made = tables.tables(study.plan, found, study.dataset if study.whole else "", study.cells)
    drawings = [drawing(study.plan, number, found, table) for number, table in enumerate(made)]
    files: dict[str, str | bytes] = {
        "rows.jsonl": "".join(json.dumps(row, sort_keys=True) + "\n" for row in _distinct(found)),
        "rows.csv": slim_csv(_distinct(found)),
        "tables.md": markdown(study, made),
        "tables.tex": "\n".join(tables.latex(table) for table in made),
        "tables.csv": tables.comma_separated(made),
        **{f"figure-{number}.svg": drawn.svg for number, drawn in enumerate(drawings) if drawn is not None},
        **{f"figure-{number}.png": drawn.png for number, drawn in enumerate(drawings) if drawn is not None},
    }
    _write(folder, files)
    shown = _pictures(study, place) if pictures else []
    wrong = {**failed, **dict.fromkeys(problems, "damaged row")}
    opening, closing = _opening(study, found, wrong), _closing(study, place, found)
    sections = [*opening, *_grids(study, made, drawings), *_pictured(study, shown), *closing]
    _write(folder, {"report.html": report.page(f"{study.plan.title}: {study.dataset}", *sections)})
    return folder / "report.html"


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        with atomic_write(folder / name) as file:
            file.write(content.encode() if isinstance(content, str) else content)


def _distinct(found: Sequence[Found]) -> list[dict[str, Any]]:
    return list({row["run"]: row for _, row in found}.values())


def markdown(study: Study, made: Sequence[Table]) -> str:
    """Return a plan's tables, compared with the paper's where it has them."""
    parts = [f"# {study.plan.title}", study.plan.about, f"`{study.command}`" if study.command else "", _figures(study)]
    for table in made:
        parts += [f"## {table.title}", tables.markdown(table)]
        if table.compared:
            parts += ["### Beside the paper's figures", _unlike(study), tables.beside_the_paper(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _pictures(study: Study, place: Place) -> list[report.View]:
    """Return the views of one attacked image, where the plan asks for them and its stream has been made."""
    done = [task for task in study.tasks if task.kind == "run" and task.done(place)] if study.pictured else []
    for experiment in (Experiment.from_description(task.definition) for task in done):
        if experiment.views and experiment.copies():
            return one_attacked_image(experiment, materials(experiment, place), SHOWN_BATCHES)
    return []


def _opening(study: Study, found: Sequence[Found], failed: Mapping[str, str]) -> Iterator[str]:
    if study.plan.about:
        yield report.paragraph(study.plan.about)
    yield report.paragraph(
        f"{len(found)} of {len(study.cells)} runs are done. Accuracy in %. {_figures(study)} Best bold, second "
        "underlined. Click a column's head to sort by it."
    )
    if failed:
        yield report.section("What went wrong", *(report.paragraph(f"{k}: {v}") for k, v in failed.items()))


def _figures(study: Study) -> str:
    """Say what the figures of a table are."""
    seeds = len({cell.seed for cell in study.cells})
    if seeds == 1:
        return "One seed, and in brackets the 95 % confidence interval over its images (Wilson)."
    return (
        f"Mean ± standard deviation over {seeds} seeds, and in brackets the 95 % confidence interval of the mean: over "
        "images (Wilson) and over seeds (Student), added in squares."
    )


def _grids(study: Study, made: Sequence[Table], drawings: Sequence[Drawing | None]) -> Iterator[str]:
    for table, drawn in zip(made, drawings, strict=True):
        content = [_sortable(table)]
        if drawn is not None:
            content.append(report.charts((drawn.svg, f"figure: {table.title}")))
        if table.compared:
            content += [report.paragraph(f"Beside the paper's figures. {_unlike(study)}"), _compared(table)]
        yield report.section(table.title, *content)


def _pictured(study: Study, shown: Sequence[report.View]) -> Iterator[str]:
    if study.pictured:
        yield report.section("One attacked image", report.views(shown) if shown else report.paragraph(NOT_SHOWN))


def _unlike(study: Study) -> str:
    full = [Recipe(**{**t.definition["recipe"], "weights": None}) for t in study.tasks if t.kind == "source"]
    ours = sorted({f"{recipe.architecture}, {recipe.steps} training steps" for recipe in full})
    hardened = {f" Robust ERM with {recipe.attack['steps']} attack steps." for recipe in full if recipe.attack}
    return f"Ours: {'; '.join(ours)}, normalised images. The paper: resnet18, 5000 steps, without.{''.join(hardened)}"


def _sortable(table: Table) -> str:
    rows = [
        (label, [report.Value(entry.mean, tables.plain(entry), mark) for entry, mark in entries])
        for label, entries in table.marked()
    ]
    return report.sortable([table.heading, *table.columns], rows)


def _compared(table: Table) -> str:
    rows = []
    for label, column, entry, paper in table.compared:
        gap = None if entry.mean is None or paper.note else entry.mean - paper.mean
        ours, theirs = report.Value(entry.mean, tables.plain(entry)), report.Value(paper.mean, f"{paper.mean:.1f}")
        rows.append((f"{label}, {column}", [ours, theirs, report.Value(gap, tables.difference(entry))]))
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
        figures = ("surrogate_clean", "surrogate_attacked")
        clean, fooled = (statistics.mean(fact[figure] for fact in facts) for figure in figures)
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
