"""The gate: tables from rows, of PACS, of the embedded data and of its earlier versions.

safer bench beyond --seeds 1 --store STORE                              # the embedded data, half an hour of two cores
python benchmarks/beyond.py rows STORE docs/results/beyond-synthetic.jsonl
cd docs/results
python ../../benchmarks/beyond.py page {beyond-synthetic,gate-first,gate-sixth,pacs,eot-synthetic,evidence-pacs}.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from evidence import FIXED, GATES, OWN, TAUGHT, mean

from safer_tta.bench.publish import Study, markdown
from safer_tta.bench.study import prepare
from safer_tta.bench.tasks import Place
from safer_tta.gate import Gate
from safer_tta.views import Pipeline

RATES = (0, 50, 100)
SEEDS = 4
STEPS = 1500  # of source training, everywhere but where schedules are compared
MOST = 3  # targets of a seed from which what there is of it is shown
TARGETS = ("art_painting", "cartoon", "photo", "sketch")
# Earlier versions, as their rows name them.
FIRST, SECOND = {"alpha_clean": 0.6, "shift": 3.0, "cost": 20.0}, {"alpha_clean": 0.6, "cost": 5.0}
THIRD = {"alpha_clean": 0.5, "cost": 5.0, "teaches": False, "equal": True, "evidence": "predicted"}
FOURTH = {**THIRD, "cost": 2.0, "spread": 0.8, "keeps": 0.8}
FIFTH = {**FOURTH, "evidence": "distance"}
GATE = dataclasses.asdict(Gate())
METHODS = (("Tent", "tent"), ("PL", "pl"), ("TSD", "tsd"))
PREDICTORS = (("", "plain"), ("+SAFER", "safer"), ("+SAFER-A", "safer-a"), ("+SAFER-gate", "safer-gate"))
COMPARED = ("plain", "safer", "safer-gate")
LABELS = {predictor: f"Tent{added}" for added, predictor in PREDICTORS}
HEADER = (
    "| accuracy, % | " + " | ".join(f"{place}, {rate} %" for place in (*TARGETS, "average") for rate in RATES) + " |",
    "|---" * (1 + len(RATES) * (len(TARGETS) + 1)) + "|",
)
Row = dict[str, Any]


def study_of(place: Place) -> Study:
    return prepare("beyond", place, seeds=1, command="safer bench beyond --seeds 1")


def rows(o: argparse.Namespace) -> None:
    place = Place(o.store)
    found, problems = study_of(place).found(place)
    assert not problems, problems
    kept = {row["run"]: json.dumps(row, sort_keys=True) for _, row in found}
    o.rows.write_text("".join(kept[name] + "\n" for name in sorted(kept)))


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page(embedded: Path, first: Path, sixth: Path, pacs: Path, eot: Path, recorded: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        place.results.folder.mkdir(parents=True)
        for row in read(embedded):
            (place.results.folder / f"{row['run']}.jsonl").write_text(json.dumps(row, sort_keys=True) + "\n")
        study = study_of(place)
        found, problems = study.found(place)
    assert not problems, problems
    text = markdown(study, study.tabulated(found)).partition("\n## ")[2].partition("\n")[2]
    views, measured = read(recorded), read(pacs)
    now, second, third, fourth = (Kept(measured, gate) for gate in (GATE, SECOND, THIRD, FOURTH))
    fifth = Kept(measured, FIFTH, [row for row in views if row["views"] == "released"])
    before = sixth_version(measured, read(sixth))
    drawn = Kept([row for _, row in found], GATE).rows
    parts = [
        now.measured(), now.lines(), replayed(views, OWN, "the gate's views"),
        *(detections(f"On PACS, seed {seed}", now.usual(seed)) for seed in now.seeds("tent")),
        f"## On the embedded data, seed 0\n{text}", detections("On the embedded data, seed 0", drawn),
        "## An attacker who knows it (embedded data, seed 0)\n", known(read(eot)),
        "## An attacker who knows it (PACS, Art Painting, 128 images, seed 0)\n",
        known([row for row in now.rows if row["defined_by"]["images"] == 128]),
        now.rates(), now.late(), before.measured(" (sixth version)"), before.lines(" (sixth version)"),
        fifth.lines(" (fifth version)"), replayed(views, "released", "the paper's views"),
        fourth.lines(" (fourth version)"), third.lines(" (third version)"),
        second.measured(" (second version)"), second.lines(" (second version)"),
        earlier(Kept(read(first), FIRST), now),
    ]  # fmt: skip
    return "\n".join(parts)


def replayed(rows: Sequence[Row], views: str, what: str) -> str:
    """What gates would have answered, by recorded views of one kind: where a target has all three rates."""
    names, rows = [*FIXED, TAUGHT, *GATES[views]], [row for row in rows if row["views"] == views]
    lines = [
        f"## What gates would have answered on PACS ({what})",
        "",
        "Recorded views, the same for every column; means over the targets named, at 0 / 50 / 100 %.",
        "",
        "| under | seed | targets | " + " | ".join(names) + " |",
        "|---" * (3 + len(names)) + "|",
    ]
    found = {(row["method"], row["seed"], row["target"], row["attack_rate"]): row["accuracy"] for row in rows}
    for method, seed in dict.fromkeys((row["method"], row["seed"]) for row in rows):
        targets = [t for t in TARGETS if all((method, seed, t, rate) in found for rate in RATES)]
        if targets:
            cells = []
            for name in names:
                figures = [[found[method, seed, t, rate][name] for t in targets] for rate in RATES]
                cells.append(" / ".join(map(mean, figures)))
            lines.append(f"| {method} | {seed} | {', '.join(targets)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


class Kept:
    """Rows of PACS, asked for by what they are of; and recorded views, where the fifth version was not run."""

    def __init__(self, rows: Sequence[Row], gate: Row, recorded: Sequence[Row] = ()) -> None:
        self.rows = [row for row in rows if row["predictor"] != "safer-gate" or _of(row, gate)]
        self.recorded = {(r["seed"], r["method"], r["target"], r["attack_rate"]): r["accuracy"] for r in recorded}

    def usual(self, seed: int) -> list[Row]:
        """Of the kind of the main table: whole streams, batches of 64, 8/255, everything else as it comes."""
        return [
            row
            for row in self.rows
            if (row["seed"], row["draw"], row["batch"], row["limit"]) == (seed, "exact", 64, None)
            and row["defined_by"]["images"] is None
            and row["defined_by"]["source"]["recipe"]["attack"] is None
            and row["defined_by"]["source"]["recipe"]["steps"] == STEPS
            and (row["attack_rate"] == 0 or round(255 * row["eps"]) == 8)
            and row["predictor_options"].get("pool", "cc_drop") == "cc_drop"
            and row["predictor_options"].get("views", 4) == 4
            and (row["predictor"] == "safer-gate" or _pipeline(row) == Pipeline())
            and (row["predictor_options"].get("mixing") or {}).get("curve", "sigmoid") == "sigmoid"
            and not row["options"].get("released")
        ]

    @functools.cached_property
    def _accuracies(self) -> dict[tuple[Any, ...], float]:
        found: dict[tuple[Any, ...], float] = {}
        for seed in range(SEEDS):
            for row in self.usual(seed):
                place = (seed, row["method"], row["predictor"], row["target"], row["attack_rate"])
                assert place not in found, place
                found[place] = row["accuracy"]
        return found

    def run(self, seed: int, method: str, predictor: str, target: str, rate: float) -> float | None:
        """The accuracy of a run."""
        return self._accuracies.get((seed, method, predictor, target, rate))

    def accuracy(self, seed: int, method: str, predictor: str, target: str, rate: float) -> float | None:
        """Of a run; or of what the gate would have answered, and SAFER beside it, by the very same views."""
        views = self.recorded.get((seed, method, target, rate), {})
        names = {"safer-gate": "fifth version", "safer": "SAFER"}
        if predictor in names and self.run(seed, method, "safer-gate", target, rate) is None and views:
            return views[names[predictor]]
        return self.run(seed, method, predictor, target, rate)

    def seeds(self, method: str, predictors: Sequence[str] = COMPARED) -> list[int]:
        """Those with everything of a method that is compared."""
        return [seed for seed in range(SEEDS) if self.targets(seed, method, predictors) == TARGETS]

    def targets(self, seed: int, method: str, predictors: Sequence[str] = COMPARED) -> tuple[str, ...]:
        """Those with everything of a method that is compared."""
        wanted = [(p, r) for p in predictors for r in RATES]
        return tuple(t for t in TARGETS if all(self.accuracy(seed, method, p, t, r) is not None for p, r in wanted))

    def mean(self, seeds: Sequence[int], method: str, predictor: str, targets: Sequence[str], rate: float) -> float:
        figures = [self.accuracy(seed, method, predictor, target, rate) for seed in seeds for target in targets]
        assert None not in figures, (method, predictor, targets, rate)
        return statistics.mean(figure for figure in figures if figure is not None)

    def measured(self, what: str = "") -> str:
        """Every method over the seeds with all that is compared; and over those with SAFER-A too, if they are fewer."""
        lines = [f"## On PACS{what}", "", *HEADER]
        for label, method in METHODS:
            whole, beside = self.seeds(method), self.seeds(method, [predictor for _, predictor in PREDICTORS])
            for seeds in [whole] if beside in (whole, []) else [whole, beside]:
                lines += self._rows(label, method, seeds)
        return "\n".join(lines) + "\n"

    def _rows(self, label: str, method: str, seeds: Sequence[int]) -> list[str]:
        places, found = [*((target,) for target in TARGETS), TARGETS], []
        for added, predictor in PREDICTORS:
            if seeds and set(seeds) <= set(self.seeds(method, [predictor])):
                figures = [self.mean(seeds, method, predictor, place, r) for place in places for r in RATES]
                cells = " | ".join(f"{figure:.1f}" for figure in figures)
                found.append(f"| {label}{added}, {_seeds(seeds)} | {cells} |")
        return found

    def lines(self, what: str = "") -> str:
        """What was to be reached, and what was."""
        text = [
            f"## The target, and what is reached{what}",
            "",
            "Differences of the averages over the four targets, or those named, in points.",
            "",
            "| under | clean, to plain (wanted -0.3) | 50 %, to SAFER (wanted +1.0) | 100 %, to SAFER (wanted -0.3) |",
            "|---|---|---|---|",
        ]
        for label, method in METHODS:
            seeds = self.seeds(method)
            alone = [[seed] for seed in seeds] if len(seeds) > 1 else []
            together = [seeds] if seeds else []
            text += [self._gaps(f"{label}, {_seeds(some)}", some, method, TARGETS) for some in together + alone]
            parts = {seed: self.targets(seed, method) for seed in range(SEEDS) if seed not in seeds}
            text += [
                self._gaps(f"{label}, seed {seed}, {', '.join(targets)} alone", [seed], method, targets)
                for seed, targets in parts.items()
                if len(targets) >= MOST
            ]
        return "\n".join(text) + "\n"

    def _gaps(self, label: str, seeds: Sequence[int], method: str, targets: Sequence[str]) -> str:
        gaps = [
            self.mean(seeds, method, "safer-gate", targets, rate) - self.mean(seeds, method, other, targets, rate)
            for rate, other in ((0, "plain"), (50, "safer"), (100, "safer"))
        ]
        return f"| {label} | " + " | ".join(f"{gap:+.2f}" for gap in gaps) + " |"

    def rates(self) -> str:
        rates = range(0, 101, 10)
        text = [
            "## Every rate (Art Painting, seed 0, Tent)",
            "",
            "| accuracy, % | " + " | ".join(f"{rate} %" for rate in rates) + " |",
            "|---" * 12 + "|",
        ]
        for added, predictor in PREDICTORS:
            figures = [self.run(0, "tent", predictor, "art_painting", rate) for rate in rates]
            if None not in figures:
                text.append(f"| Tent{added} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
        return "\n".join(text) + "\n"

    def late(self) -> str:
        text = [
            "## Hostile from half-way on (Art Painting, seed 0, Tent)",
            "",
            "| accuracy, % | half of the later images | all of them |",
            "|---|---|---|",
        ]
        for added, predictor in PREDICTORS:
            found = {
                row["attack_rate"]: f"{row['accuracy']:.1f}"
                for row in self.rows
                if (row["draw"], row["seed"], row["method"], row["predictor"]) == ("late", 0, "tent", predictor)
            }
            if found:
                text.append(f"| Tent{added} | {found[50]} | {found[100]} |")
        return "\n".join(text) + "\n"


def sixth_version(rows: Sequence[Row], sixth: Sequence[Row]) -> Kept:
    """Under other methods than TSD it is the gate of now, and its rows are named like those of now."""
    return Kept([*(row for row in rows if row["predictor"] != "safer-gate"), *sixth], GATE)


def _of(row: Row, gate: Row) -> bool:
    """Whether a row is of this version of the gate, on its own views."""
    own = Pipeline(Gate().pipeline if gate == GATE else "released")
    return row["predictor_options"]["mixing"] == {"name": "gate", **gate} and _pipeline(row) == own


def _pipeline(row: Row) -> Pipeline:
    return Pipeline(**row["predictor_options"].get("pipeline", {}))


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def detections(where: str, found: Sequence[Row]) -> str:
    """Does suspicion tell attacked images from clean ones, and is it wise to leave the most suspicious unanswered?"""
    lines = [
        f"## Detection and coverage: {where[0].lower()}{where[1:]}",
        "",
        "Half of every batch attacked, Tent. AUROC of suspicion as a detector of attacked images; accuracy when only",
        "the least suspicious 100, 90, … 50 % of the images are answered.",
        "",
        "| target | predictor | AUROC | 100 % | 90 % | 80 % | 70 % | 60 % | 50 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    seen: dict[tuple[str, str], str] = {}
    for row in found:
        key = (row["target"], row["predictor"])
        plain = row["method"] == "tent" and row["draw"] == "exact" and row["batch"] == 64 and row["attack_rate"] == 50
        if plain and row["detection"] is not None and key not in seen and round(255 * row["eps"]) == 8:
            figures = " | ".join(f"{figure:.1f}" for figure in row["selective"])
            seen[key] = f"| {key[0]} | {key[1]} | {row['detection']:.3f} | {figures} |"
    return "\n".join([*lines, *(seen[key] for key in sorted(seen))]) + "\n"


def _defence(row: Row) -> tuple[str, str, str]:
    options = row["predictor_options"]
    return row["predictor"], options.get("pool", ""), json.dumps(options.get("mixing"), sort_keys=True)


def known(rows: Sequence[Row]) -> str:
    """The attacker who knows it all, and what abstaining from the most suspicious half would save."""
    draws = (0, 1, 4, 8)
    lines = [
        "| accuracy, % | transferred | " + " | ".join(f"EOT, K = {k}" for k in draws[1:]) + " | K = 8, half answered |",
        "|---" * (2 + len(draws)) + "|",
    ]
    for row in rows:
        if row["attack"] == "pgd":  # one for every defence
            mine = [r for r in rows if _defence(r) == _defence(row)]
            found = {(r["threat"].get("draws") or 0): r for r in mine}
            predictor, pool, _ = _defence(row)
            label = LABELS[predictor] + (" (mean)" if pool == "mean" else "")
            figures = [f"{found[k]['accuracy']:.1f}" if k in found else "–" for k in draws]
            figures.append(f"{found[8]['selective'][-1]:.1f}" if 8 in found else "–")
            lines.append(f"| {label} | " + " | ".join(figures) + " |")
    (plain,) = (row for row in rows if row["predictor"] == "plain")
    lines.append(f"| Tent | – | {plain['accuracy']:.1f} | – | – | – |")
    return "\n".join(lines) + "\n"


def earlier(first: Kept, pacs: Kept) -> str:
    """The first version of the gate beside what it was to beat, on PACS, seed 0, under Tent."""
    lines = ["## A first version, on PACS, seed 0", "", *HEADER]
    for added, predictor in PREDICTORS:
        among, label = (first, "+first gate") if predictor == "safer-gate" else (pacs, added)
        figures = [among.mean([0], "tent", predictor, p, r) for p in [(t,) for t in TARGETS] + [TARGETS] for r in RATES]
        lines.append(f"| Tent{label} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeper = commands.add_parser("rows")
    keeper.add_argument("store", type=Path)
    keeper.add_argument("rows", type=Path)
    pager = commands.add_parser("page")
    for name in ("embedded", "first", "sixth", "pacs", "eot", "recorded"):
        pager.add_argument(name, type=Path)
    o = parser.parse_args()
    if o.command == "page":
        sys.stdout.write(page(o.embedded, o.first, o.sixth, o.pacs, o.eot, o.recorded))
    else:
        rows(o)


if __name__ == "__main__":
    main()
