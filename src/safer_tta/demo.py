"""The demo: train, attack, adapt, and compare with and without SAFER, in three minutes on a CPU."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._internal.files import atomic_write
from ._internal.progress import progress
from .attacks import full_threat
from .bench import figures, report
from .bench.experiment import AttackOn, Experiment
from .bench.figures import Curve
from .bench.qualitative import one_attacked_image
from .bench.run import Materials, perform
from .data import ArrayStore, Dataset, StreamSpec, excerpt, open_dataset
from .data.store import digest_file
from .evaluation.metrics import rolling
from .training import attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate
from .training.definitions import definition_of
from .training.trainer import accuracy

RATES = (0, 25, 50, 75, 100)
TABLE_RATES = (0, 50, 100)
IMAGES = 960
ROLLING = 4
RELIABILITY = (
    "r is a view's reliability: how well its features agree with those of the other views, over the batch. The least "
    "reliable view is dropped."
)
LIMITS = "An attacker who knows that SAFER is used, and computes gradients through the views, defeats it."


@dataclass(frozen=True)
class Way:
    """A way to answer: a method on a predictor."""

    label: str
    method: str
    predictor: str
    predictor_options: Mapping[str, Any] = field(default_factory=dict)


WAYS = (
    Way("none", "none", "plain"),
    Way("Static TTE", "none", "safer", {"pool": "mean"}),
    Way("Tent", "tent", "plain"),
    Way("Tent + SAFER", "tent", "safer"),
    Way("Tent + SAFER-A", "tent", "safer-a"),
    Way("Tent + SAFER-G", "tent", "safer-g"),
)
SHOWN = WAYS[3]  # whose views the page shows


@dataclass(frozen=True)
class Demo:
    rows: dict[tuple[str, int], dict[str, Any]]  # by label and attack rate
    surrogate: tuple[float, float]  # the accuracy of the attacker's own model on clean and on attacked images
    page: Path

    def table(self) -> list[tuple[str, list[float]]]:
        return [(way.label, [self.rows[way.label, rate]["accuracy"] for rate in TABLE_RATES]) for way in WAYS]


def run_demo(folder: Path, *, target: str = "sketch", seed: int = 0) -> Demo:
    """Make everything in `folder`; what exists already is not made again."""
    dataset = open_dataset("synthetic")
    domain = excerpt(dataset.domain(target), IMAGES, seed)
    source, surrogate_path = (folder / f"{kind}-{target}-{seed}.safetensors" for kind in ("source", "surrogate"))
    with progress(f"source model, all domains but {target}") as tick:
        train_source(dataset, target, source_recipe("synthetic", seed=seed), source, tick=tick)
    with progress(f"the attacker's surrogate, on {target}") as tick:
        recipe = surrogate_recipe("synthetic", seed=seed)
        surrogate = train_surrogate(dataset.domain(target), recipe, surrogate_path, tick=tick)
    with progress("attacked images (PGD, 8/255, 20 steps)") as tick:
        store, made_on = ArrayStore(folder / "attacked"), digest_file(surrogate_path)
        attacked = attacked_copies(domain, surrogate, store, source=made_on, seed=seed, tick=tick)
    materials = Materials((domain,), source, (attacked,))
    runs = _experiments(dataset, target, seed, source, surrogate_path)
    rows = {}
    with progress("six ways to answer at five attack rates") as tick:
        for key, experiment in runs.items():
            rows[key] = perform(experiment, materials, folder / "runs")
            tick(len(rows), len(runs))
    with atomic_write(folder / "results.jsonl") as file:
        file.writelines(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows.values())
    clean, fooled = (accuracy(surrogate, images, domain.labels) for images in (domain.images, attacked))
    found = Demo(rows, (clean, fooled), folder / "report.html")
    shown = one_attacked_image(runs[SHOWN.label, 100], materials)
    with atomic_write(found.page) as file:
        file.write(_page(found, target, shown).encode())
    return found


def _experiments(
    dataset: Dataset, target: str, seed: int, source: Path, surrogate: Path
) -> dict[tuple[str, int], Experiment]:
    attack = AttackOn(name="pgd", threat=full_threat(), surrogates=(definition_of(surrogate),))
    return {
        (way.label, rate): Experiment(
            data=dataset.identity,
            target=target,
            source=definition_of(source),
            method=way.method,
            predictor=way.predictor,
            predictor_options=way.predictor_options,
            stream=StreamSpec(attack_rate=rate, seed=seed),
            attack=attack if rate else None,
            images=IMAGES,
        )
        for way in WAYS
        for rate in RATES
    }


def _page(found: Demo, target: str, shown: list[report.View]) -> str:
    clean, fooled = found.surrogate
    views = report.views(shown) if shown else report.paragraph("In this stream, no image was saved by its views.")
    header = ["accuracy, %", *(f"{rate} %" for rate in TABLE_RATES)]
    return report.page(
        "safer-tta: adapting under attack",
        report.paragraph(
            f"A classifier trained on three drawn domains meets the fourth, {target}, as a stream of {IMAGES} images. "
            "An attacker has perturbed some of them (PGD, 8/255) on another model, trained on images like these: "
            f"that model falls from {clean:.1f} % to {fooled:.1f} %. Everything here was computed on this machine."
        ),
        report.section("Accuracy at 0, 50 and 100 % attacked", report.table(header, found.table())),
        report.section("Accuracy by attack rate and over the stream", _charts(found)),
        report.section("One attacked image and the answers of its views", report.paragraph(RELIABILITY), views),
        report.section("What SAFER does not withstand", report.paragraph(LIMITS)),
    )


def _charts(found: Demo) -> str:
    by_rate = {way.label: Curve(RATES, [found.rows[way.label, rate]["accuracy"] for rate in RATES]) for way in WAYS}
    moving = {way.label: rolling(found.rows[way.label, 100]["batch_accuracy"], ROLLING) for way in WAYS}
    over_time = {label: Curve(range(1, len(values) + 1), values) for label, values in moving.items()}
    left = figures.lines(by_rate, x="attacked, % of each batch", title="by attack rate")
    right = figures.lines(over_time, x="batch", title=f"all attacked, mean of {ROLLING} batches")
    return report.charts((left.svg, "by attack rate"), (right.svg, "over the stream"))
