"""PACS for real: the tasks that travel to a GPU machine, the rows that come back, the page that is made from them.

python benchmarks/pacs.py tasks --data PACS --weights W --seeds 1 --out carry/tasks.json main pooling   # where they lie
python benchmarks/pacs.py tasks --data PACS --weights W --only 2 3 --recordings --out carry/views.json main     # or
python benchmarks/pacs.py restore docs/results/pacs.jsonl STORE          # there: what is done is not made again
safer bench tasks carry/tasks.json --data PACS --weights W --store STORE --device cuda --workers 4      # there
python benchmarks/pacs.py rows STORE docs/results/pacs.jsonl docs/results/pacs-attacks.jsonl   # here: what came back
python benchmarks/pacs.py page docs/results/pacs.jsonl docs/results/pacs-attacks.jsonl   # without data and GPU
python benchmarks/pacs.py figures docs/results/pacs.jsonl docs/results
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safer_tta.bench.tasks import Place

SETTINGS: dict[str, Any] = {"architecture": "resnet50", "steps": 1500, "robust_steps": 300, "precision": "bfloat16"}
PLANS = (
    "main", "pooling", "views", "max-operators", "alpha-mode", "alpha-signal", "attack-rate", "stability", "epsilon",
    "autoattack", "eot", "released",
)  # fmt: skip
Found = tuple[Any, Any]  # a cell of a plan, and the row of its run
ENOUGH = 0.5
GATE = "pacs-beyond-0.svg"  # of the gate's figures the one that is shown
FULL = 5000  # training steps, as in the paper: of one target, to see what fewer cost
IMAGES = {"alpha-signal": 512, "autoattack": 512, "eot": 128}  # of a stream, where all would take too long


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return {**SETTINGS, "images": IMAGES.get(name), **changes}


def tasks(o: argparse.Namespace) -> None:
    """Every task of several plans, once, for a machine that has no pydantic."""
    from safer_tta.bench.study import prepare
    from safer_tta.bench.tasks import write_tasks

    sys.path.insert(0, str(Path(__file__).parent))
    from recordings import task_for

    place = Place(Path("unused"), o.data, weights=o.weights)
    seeds = o.only if o.only else range(o.seeds)
    known, asked = {}, {}
    for name in o.plans:
        study = prepare(name, place, seeds=1 + max(seeds), targets=o.targets, **settings(name, steps=o.steps))
        known |= {task.name: task for task in study.tasks}
        runs = [t for t in study.tasks if t.kind == "run" and t.definition["stream"]["seed"] in seeds]
        views = [task_for(t) for t in runs if t.definition["predictor"] == "safer"] if o.recordings else []
        asked |= {task.name: task for task in (*views, *(() if o.recordings else runs))}
    found = {}  # plan by plan, and each with what it needs before it: what is cut off is the end of the last
    for task in asked.values():
        found |= {name: known[name] for name in task.needs if name not in found} | {task.name: task}
    write_tasks(o.out, list(found.values()))
    kinds = Counter(task.kind for task in found.values())
    print(f"{kinds['run']} runs, {kinds['recording']} recordings, {len(found)} tasks")


def restore(o: argparse.Namespace) -> None:
    runs = Place(o.store).results.folder
    runs.mkdir(parents=True, exist_ok=True)
    for line in lines(o.rows):
        (runs / f"{json.loads(line)['run']}.jsonl").write_text(line + "\n")


def rows(o: argparse.Namespace) -> None:
    """What a store holds, added to what was kept; sorted, so that a change is easy to see."""
    kept = {json.loads(line)["run"]: line for line in lines(o.rows)}
    for row in Place(o.store).results.rows():
        kept.setdefault(row["run"], json.dumps(row, sort_keys=True))
    o.rows.write_text("".join(kept[name] + "\n" for name in sorted(kept)))
    attacks = set(lines(o.attacks)) | {
        json.dumps(json.loads(file.read_text()), sort_keys=True) for file in o.store.glob("made/attacked-*.json")
    }
    o.attacks.write_text("".join(line + "\n" for line in sorted(attacks)))
    print(f"{len(kept)} rows, {len(attacks)} sets of attacked images")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# --- the page -------------------------------------------------------------------------------------------------------


def page(path: Path, attacks: Path, seeds: int = 3) -> str:
    """Tables beside the paper's, from the rows alone."""
    kept = [json.loads(line) for line in lines(path)]
    with restored(path) as place:
        parts = [section(name, place, kept, seeds) for name in PLANS if kept] + [schedules(kept)]
    parts += [fooled([json.loads(line) for line in lines(attacks)]), cost(kept)]
    return "\n".join(part for part in parts if part)


@contextlib.contextmanager
def restored(path: Path) -> Iterator[Place]:
    """A store with the rows of a file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        restore(argparse.Namespace(rows=path, store=place.store))
        yield place


def main_runs(kept: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(name, cell) of every run of the main table, done or not."""
    cells, names, _, _ = planned("main", kept, 3)
    return list(zip(names, cells, strict=True))


def section(name: str, place: Place, kept: Sequence[dict[str, Any]], seeds: int) -> str:
    """A plan's tables, or nothing where too few of its runs are done."""
    from safer_tta.bench.publish import markdown

    shown = shown_of(name, place, kept, seeds)
    if shown is None:
        return ""
    study, found, note = shown
    text, mark, beside = deeper(markdown(study, study.tabulated(found))).partition("### Beside")
    pictures = [f"![{study.plan.title}]({file})" for file in drawn(study, found)]
    return "\n\n".join([text.rstrip(), *pictures, note, f"{mark}{beside}".rstrip()]).rstrip() + "\n"


def shown_of(
    name: str, place: Place, kept: Sequence[dict[str, Any]], seeds: int
) -> tuple[Any, list[Found], str] | None:
    """(the study with what of it is shown, its runs, a line on what these are)."""
    from safer_tta.bench.publish import Study

    cells, runs, made, plan = planned(name, kept, seeds)
    study = Study(name, plan, "pacs", cells, made, runs, whole=name not in IMAGES)
    found, problems = study.found(place)
    assert not problems, problems
    main = set() if name == "main" else {run for run, _ in main_runs(kept)}
    found, seeds_of = furthest(begun(cells, runs, found, main))
    found = filled_rows(cells, found)
    if not found:
        return None
    images = f" The first {IMAGES[name]} images of each stream." if name in IMAGES else ""
    count = len({row["run"] for _, row in found})
    note = f"Seeds: {seeds_of}.{images} {count} runs.{to_do(cells, found)}"
    return dataclasses.replace(study, plan=without_empty_rows(plan, found)), found, note


def drawn(study: Any, found: Sequence[Found]) -> dict[str, str]:
    """{file: SVG} of a study's figures."""
    from safer_tta.bench.drawings import drawing

    made = {
        f"pacs-{study.name}-{number}.svg": drawing(study.plan, number, found, table)
        for number, table in enumerate(study.tabulated(found))
    }
    return {file: figure.svg for file, figure in made.items() if figure is not None}


def figures(path: Path, seeds: int = 3) -> dict[str, str]:
    """{file: SVG} of every figure of the page."""
    kept = [json.loads(line) for line in lines(path)]
    with restored(path) as place:
        studies = [shown_of(name, place, kept, seeds) for name in PLANS]
        gate = shown_of("beyond", place, kept, seeds + 1)  # with a seed more than the others, on a page of its own
    made = {file: svg for shown in studies if shown for file, svg in drawn(shown[0], shown[1]).items()}
    return made | ({GATE: drawn(gate[0], gate[1])[GATE]} if gate else {})


def deeper(text: str) -> str:
    """Headings one level down, for a page with a heading of its own; a table that is called as its plan needs none."""
    title = text.partition("\n")[0].removeprefix("# ")
    alone = f"\n## {title}\n" in text
    text = text.replace(f"\n## {title}\n\n", "\n")
    return "\n".join(f"#{line}" if line.startswith("# " if alone else "#") else line for line in text.splitlines())


def begun(cells: Sequence[Any], names: Sequence[str], found: Sequence[Found], main: set[str]) -> list[Found]:
    """Without the tables and targets of whose own runs, which the main table does not have, less than half are
    done: what they share with it would stand there alone."""
    own = [cell for cell, name in zip(cells, names, strict=True) if name not in main]
    wanted = Counter((cell.grid, cell.target, cell.seed) for cell in own)
    done = Counter((cell.grid, cell.target, cell.seed) for cell, row in found if row["run"] not in main)
    far = {place[:2] for place, count in wanted.items() if done[place] >= ENOUGH * count}
    return [(cell, row) for cell, row in found if (cell.grid, cell.target) in far or not own]


def filled_rows(cells: Sequence[Any], found: Sequence[Found]) -> list[Found]:
    """Without the rows of a table that have next to nothing in them."""
    seen = {(cell.grid, cell.target, cell.seed) for cell, _ in found}
    wanted = Counter((c.grid, c.row.label) for c in cells if (c.grid, c.target, c.seed) in seen)
    done = Counter((c.grid, c.row.label) for c, _ in found)
    return [(c, row) for c, row in found if done[c.grid, c.row.label] >= ENOUGH * wanted[c.grid, c.row.label]]


def without_empty_rows(plan: Any, found: Sequence[Found]) -> Any:
    rows = {(cell.grid, cell.row.label) for cell, _ in found}
    grids = [
        grid.model_copy(update={"rows": tuple(row for row in grid.rows if (number, row.label) in rows)})
        for number, grid in enumerate(plan.grids)
    ]
    return plan.model_copy(update={"grids": tuple(grids)})


def to_do(cells: Sequence[Any], found: Sequence[Found]) -> str:
    """The rows and targets of which nothing is shown, and the holes in tables of something varied."""
    done = [cell for cell, _ in found]
    seen = {name for cell in done for name in (cell.row.label, cell.target)}
    places = {(cell.grid, cell.target, cell.seed) for cell in done}
    missing = [name for cell in cells for name in (cell.row.label, cell.target) if name not in seen]
    missing += [
        f"{cell.row.label} ({', '.join(map(str, cell.varied.values()))})"
        for cell in cells
        if cell.varied and (cell.grid, cell.target, cell.seed) in places and cell.row.label in seen and cell not in done
    ]
    return f" Still to be measured: {', '.join(dict.fromkeys(missing))}." if missing else ""


def furthest(found: Sequence[Found]) -> tuple[list[Found], str]:
    """Of every table and target the seeds that are done as far as any, and which these are: means over other seeds in
    one row than in the next would not compare."""
    done: dict[tuple[int, str], dict[int, int]] = {}
    for cell, _ in found:
        seeds = done.setdefault((cell.grid, cell.target), {})
        seeds[cell.seed] = seeds.get(cell.seed, 0) + 1
    chosen = {place: {s for s, n in seeds.items() if n == max(seeds.values())} for place, seeds in done.items()}
    kept = [(cell, row) for cell, row in found if cell.seed in chosen[cell.grid, cell.target]]
    said = {f"{target} {', '.join(map(str, sorted(seeds)))}" for (_, target), seeds in chosen.items()}
    one = {tuple(sorted(seeds)) for seeds in chosen.values()}
    return kept, ", ".join(map(str, one.pop())) if len(one) == 1 else "; ".join(sorted(said))


def schedules(kept: Sequence[dict[str, Any]]) -> str:
    """Art Painting after as many training steps as the paper's beside the page's own, for seed 0."""
    found = {row["run"]: row["accuracy"] for row in kept}
    table: dict[str, dict[tuple[float, int], float]] = {}
    for steps in (SETTINGS["steps"], FULL):
        cells, names, _, _ = planned("main", kept, 1, steps=steps)
        for cell, name in zip(cells, names, strict=True):
            if cell.target == "art_painting" and cell.row.source == "erm" and name in found:
                table.setdefault(cell.row.label, {})[cell.attack_rate, steps] = found[name]
    wanted = [(rate, steps) for rate in (0, 50, 100) for steps in (SETTINGS["steps"], FULL)]
    lines = [
        "## The full schedule (Art Painting, seed 0)",
        "",
        "| accuracy, % | " + " | ".join(f"{rate} %, {steps} steps" for rate, steps in wanted) + " |",
        "|---" * (1 + len(wanted)) + "|",
    ]
    both = {label: row for label, row in table.items() if set(wanted) <= set(row)}
    for label, row in both.items():
        lines.append(f"| {label} | " + " | ".join(f"{row[place]:.1f}" for place in wanted) + " |")
    return "\n".join(lines) + "\n" if both else ""


def planned(
    name: str, kept: Sequence[dict[str, Any]], seeds: int, **changes: Any
) -> tuple[list[Any], list[str], list[Any], Any]:
    """(cells, names of their runs, tasks, the plan), without data or weights: rows know what they were made from."""
    from safer_tta.bench import plan as plans
    from safer_tta.bench.graph import graph, size_for
    from safer_tta.data import Dataset
    from safer_tta.data.domains import KNOWN

    defined, known = kept[0]["defined_by"], KNOWN["pacs"]
    dataset = Dataset("pacs", tuple(known.domains), ("",) * known.classes, _absent, defined["dataset"])
    plan = plans.load(name)
    cells = plans.cells(plan, dataset, seeds=seeds)
    size = size_for("pacs", weights=f"hash:{defined['source']['recipe']['weights']}", **settings(name, **changes))
    made, runs = graph(cells, dataset, size)
    return cells, runs, made, plan


def _absent(name: str) -> Any:
    raise RuntimeError(f"the page is made from rows; nobody needs the images of {name}")


def fooled(attacks: Sequence[dict[str, Any]]) -> str:
    """What the attacker's own models make of the images, before and after."""
    table = [
        "## The attacker's own models",
        "",
        "| target | attack | budget, 255ths | seed | training steps | images | accuracy, clean | attacked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fact in attacks:
        what = fact["definition"]
        where, eps = what["surrogate"]["surrogate"], 255 * what["threat"]["eps"]
        steps = what["surrogate"]["recipe"]["steps"]
        figures = f"{steps} | {fact['images']} | {fact['surrogate_clean']:.1f} | {fact['surrogate_attacked']:.1f} |"
        table.append(f"| {where} | {what['attack']} | {eps:g} | {what['seed']} | {figures}")
    return "\n".join([*table[:4], *sorted(table[4:])]) + "\n"


def cost(kept: Sequence[dict[str, Any]]) -> str:
    """Time and memory of a run, by method and predictor; several runs shared the GPU. Of batches of 64 alone: a step
    of one image says nothing of those."""
    kept = [row for row in kept if row["batch"] == 64]
    table = [
        "## Cost of a run",
        "",
        "Batches of 64. With other runs beside it on the same GPU; times alone are in docs/performance.md.",
        "",
        "| method | predictor | ms per step | images per s | peak MB |",
        "|---|---|---|---|---|",
    ]
    for key in sorted({(row["method"], row["predictor"]) for row in kept}):
        mine = [row for row in kept if (row["method"], row["predictor"]) == key]
        middle = [
            statistics.median(row[figure] for row in mine) for figure in ("ms_per_step", "images_per_s", "peak_mb")
        ]
        table.append(f"| {key[0]} | {key[1]} | " + " | ".join(f"{value:.0f}" for value in middle) + " |")
    return "\n".join(table) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planner = commands.add_parser("tasks")
    planner.add_argument("plans", nargs="+")
    planner.add_argument("--data", required=True)
    planner.add_argument("--weights", required=True)
    planner.add_argument("--seeds", type=int, default=3)
    planner.add_argument("--only", type=int, nargs="*", default=(), help="these seeds")
    planner.add_argument("--targets", nargs="*", default=())
    planner.add_argument("--recordings", action="store_true", help="of the runs on SAFER, instead of the runs")
    planner.add_argument("--steps", type=int, default=SETTINGS["steps"], help=f"{FULL}: as in the paper")
    planner.add_argument("--out", type=Path, required=True)
    restorer = commands.add_parser("restore")
    restorer.add_argument("rows", type=Path)
    restorer.add_argument("store", type=Path)
    keeper = commands.add_parser("rows")
    keeper.add_argument("store", type=Path)
    keeper.add_argument("rows", type=Path)
    keeper.add_argument("attacks", type=Path)
    pager = commands.add_parser("page")
    pager.add_argument("rows", type=Path)
    pager.add_argument("attacks", type=Path)
    drawer = commands.add_parser("figures")
    drawer.add_argument("rows", type=Path)
    drawer.add_argument("folder", type=Path)
    o = parser.parse_args()
    if o.command == "page":
        sys.stdout.write(page(o.rows, o.attacks))
    elif o.command == "figures":
        for file, svg in figures(o.rows).items():
            (o.folder / file).write_text(svg)
    else:
        {"tasks": tasks, "restore": restore, "rows": rows}[o.command](o)


if __name__ == "__main__":
    main()
