"""What the project is for, in three minutes on a CPU: train, attack, adapt, and show what SAFER does about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench import figures, report
from .bench.figures import Curve
from .bench.qualitative import one_attacked_image
from .bench.run import Run, Setting, perform, rolling
from .data import ArrayStore, StreamSpec, excerpt, open_dataset
from .data.store import digest_file
from .progress import Tick, progress
from .tensorfile import atomic_write
from .training import THREAT, attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate
from .training.trainer import accuracy

RATES = (0, 25, 50, 75, 100)
TABLE_RATES = (0, 50, 100)
IMAGES = 960
ROLLING = 4


@dataclass(frozen=True)
class Row:
    label: str
    method: str
    predictor: str
    options: Mapping[str, Any]


ROWS = (
    Row("none", "none", "plain", {}),
    Row("Static TTE", "none", "safer", {"pool": "mean"}),
    Row("Tent", "tent", "plain", {}),
    Row("Tent + SAFER", "tent", "safer", {}),
    Row("Tent + SAFER-A", "tent", "safer-a", {}),
    Row("Tent + SAFER, the gate", "tent", "safer-gate", {}),
)


@dataclass(frozen=True)
class Demo:
    """What the demo found: rows by (label, rate), the surrogate's accuracy, where the page is."""

    rows: dict[tuple[str, int], dict[str, Any]]
    surrogate: tuple[float, float]
    page: Path

    def table(self) -> list[tuple[str, list[float]]]:
        return [(row.label, [self.rows[row.label, rate]["accuracy"] for rate in TABLE_RATES]) for row in ROWS]


def run_demo(folder: Path, *, target: str = "sketch", seed: int = 0) -> Demo:
    """Everything into `folder`; what is there already is not made again."""
    dataset = open_dataset("synthetic")
    domain = excerpt(dataset.domain(target), IMAGES, seed)
    with progress(f"source model, all domains but {target}") as tick:
        recipe = source_recipe("synthetic", seed=seed)
        source_path = folder / f"source-{target}-{seed}.safetensors"
        source = train_source(dataset, target, recipe, source_path, report=tick)
    with progress(f"the attacker's surrogate, on {target}") as tick:
        recipe = surrogate_recipe("synthetic", seed=seed)
        path = folder / f"surrogate-{target}-{seed}.safetensors"
        surrogate = train_surrogate(dataset.domain(target), recipe, path, report=tick)
    with progress("attacked images (PGD, 8/255, 20 steps)") as tick:
        store = ArrayStore(folder / "attacked")
        attacked = attacked_copies(domain, surrogate, store, source=digest_file(path), seed=seed, progress=tick)
    setting = Setting((domain,), (attacked,), THREAT, source_path)
    with progress("six ways to answer at five attack rates") as tick:
        rows = _rows(setting, folder / "runs", seed, tick)
    with atomic_write(folder / "results.jsonl") as file:
        file.writelines(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows.values())
    clean, fooled = (accuracy(surrogate, images, domain.labels) for images in (domain.images, attacked))
    found = Demo(rows, (clean, fooled), folder / "report.html")
    shown = one_attacked_image(source, domain, attacked, seed)
    with atomic_write(found.page) as file:
        file.write(_page(found, target, shown).encode())
    return found


def _rows(setting: Setting, folder: Path, seed: int, tick: Tick) -> dict[tuple[str, int], dict[str, Any]]:
    rows = {}
    for row in ROWS:
        for rate in RATES:
            stream = StreamSpec(attack_rate=rate, seed=seed)
            run = Run(method=row.method, predictor=row.predictor, predictor_options=row.options, stream=stream)
            rows[row.label, rate] = perform(run, setting, folder)
            tick(len(rows), len(ROWS) * len(RATES))
    return rows


def _page(found: Demo, target: str, shown: list[report.View]) -> str:
    by_rate = {row.label: Curve(RATES, [found.rows[row.label, rate]["accuracy"] for rate in RATES]) for row in ROWS}
    over_time = {}
    for row in ROWS:
        curve = rolling(found.rows[row.label, 100]["batch_accuracy"], ROLLING)
        over_time[row.label] = Curve(list(range(1, len(curve) + 1)), curve)
    clean, fooled = found.surrogate
    return report.page(
        "safer-tta: adapting under attack",
        report.paragraph(
            f"A classifier trained on three drawn domains meets the fourth, {target}, as a stream of {IMAGES} images. "
            "An attacker has perturbed some of them (PGD, 8/255) on a model of its own, trained on images like these: "
            f"that model falls from {clean:.1f} % to {fooled:.1f} %. Everything here was computed on this machine."
        ),
        report.section(
            "Accuracy at 0, 50 and 100 % attacked",
            report.table(["accuracy, %", *(f"{rate} %" for rate in TABLE_RATES)], found.table()),
        ),
        report.section(
            "How it falls, and how it goes on",
            report.charts(
                (figures.lines(by_rate, x="attacked, % of each batch", title="against the attack rate").svg, "by rate"),
                (
                    figures.lines(over_time, x="batch", title=f"all attacked, mean of {ROLLING} batches").svg,
                    "over the stream",
                ),
            ),
        ),
        report.section(
            "One attacked image, and what its views say",
            report.paragraph(
                "r is a view's reliability: how well its features agree with the other views', over the batch. The "
                "least reliable view is dropped."
            ),
            report.views(shown) if shown else report.paragraph("No image of this stream shows it."),
        ),
        report.section(
            "What this is not",
            report.paragraph(
                "A defence against an attacker who knows that SAFER is there: one who differentiates through the views "
                "defeats it."
            ),
        ),
    )
