"""The gate: tables from rows, of the embedded data and of its first version on PACS.

safer bench beyond --seeds 1 --store STORE                              # the embedded data, half an hour of two cores
python benchmarks/beyond.py rows STORE docs/results/beyond-synthetic.jsonl
python benchmarks/beyond.py page docs/results/{beyond-synthetic,gate-first,pacs}.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safer_tta.bench.publish import Study, markdown
from safer_tta.bench.study import prepare
from safer_tta.bench.tables import tables
from safer_tta.bench.tasks import Place

RATES = (0, 50, 100)
TARGETS = ("art_painting", "cartoon", "photo", "sketch")
FIRST = {"name": "gate", "alpha_clean": 0.6, "shift": 3.0, "cost": 20.0}
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


def page(embedded: Path, first: Path, pacs: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        place.results.folder.mkdir(parents=True)
        for row in read(embedded):
            (place.results.folder / f"{row['run']}.jsonl").write_text(json.dumps(row, sort_keys=True) + "\n")
        study = study_of(place)
        found, problems = study.found(place)
    assert not problems, problems
    text = markdown(study, tables(study.plan, found, "synthetic")).partition("\n## ")[2]
    return f"## {text}\n{detections([row for _, row in found])}\n{earlier(read(first), read(pacs))}"


def detections(found: Sequence[Row]) -> str:
    """Does suspicion tell attacked images from clean ones, and is it wise to leave the most suspicious unanswered?"""
    lines = [
        "## Detection and coverage",
        "",
        "Half of every batch attacked. AUROC of suspicion as a detector of attacked images; accuracy when only the",
        "least suspicious 100, 90, … 50 % of the images are answered.",
        "",
        "| target | predictor | AUROC | 100 % | 90 % | 80 % | 70 % | 60 % | 50 % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    seen = set()
    for row in found:
        key = (row["target"], row["predictor"])
        plain = row["method"] == "tent" and row["draw"] == "exact" and row["batch"] == 64 and row["attack_rate"] == 50
        if plain and row["detection"] is not None and key not in seen and round(255 * row["eps"]) == 8:
            seen.add(key)
            lines.append(
                f"| {key[0]} | {key[1]} | {row['detection']:.3f} | "
                + " | ".join(f"{figure:.1f}" for figure in row["selective"])
                + " |"
            )
    return "\n".join(lines) + "\n"


def earlier(first: Sequence[Row], pacs: Sequence[Row]) -> str:
    """The first version of the gate beside what it was to beat, on PACS, seed 0, under Tent."""
    lines = [
        "## A first version, on PACS",
        "",
        "| accuracy, % | "
        + " | ".join(f"{target}, {rate} %" for target in (*TARGETS, "average") for rate in RATES)
        + " |",
        "|---" * (1 + len(RATES) * (len(TARGETS) + 1)) + "|",
    ]
    for label, predictor, among in (
        ("Tent", "plain", pacs),
        ("Tent+SAFER", "safer", pacs),
        ("Tent+SAFER-A", "safer-a", pacs),
        ("Tent+first gate", "safer-gate", first),
    ):
        cells = {(t, r): accuracy(among, predictor, t, r) for t in TARGETS for r in RATES}
        averages = [statistics.mean(cells[t, r] for t in TARGETS) for r in RATES]
        figures = [cells[t, r] for t in TARGETS for r in RATES] + averages
        lines.append(f"| {label} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    return "\n".join(lines) + "\n"


def accuracy(among: Sequence[Row], predictor: str, target: str, rate: int) -> float:
    """Of the one run that is of the main table's kind."""
    usual = [
        row["accuracy"]
        for row in among
        if (row["method"], row["predictor"], row["target"], row["attack_rate"]) == ("tent", predictor, target, rate)
        and (row["seed"], row["draw"], row["batch"], row["limit"]) == (0, "exact", 64, None)
        and (rate == 0 or round(255 * row["eps"]) == 8)
        and row["predictor_options"].get("pool", "cc_drop") == "cc_drop"
        and (predictor != "safer-gate" or row["predictor_options"]["mixing"] == FIRST)
    ]
    assert len(usual) == 1, (predictor, target, rate, len(usual))
    return float(usual[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keeper = commands.add_parser("rows")
    keeper.add_argument("store", type=Path)
    keeper.add_argument("rows", type=Path)
    pager = commands.add_parser("page")
    for name in ("embedded", "first", "pacs"):
        pager.add_argument(name, type=Path)
    o = parser.parse_args()
    if o.command == "page":
        sys.stdout.write(page(o.embedded, o.first, o.pacs))
    else:
        rows(o)


if __name__ == "__main__":
    main()
