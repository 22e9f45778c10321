"""What the project is for, in three minutes on a CPU: train, attack, adapt, and show what SAFER does about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .api import adapt
from .bench import figures, report
from .bench.run import Run, Setting, perform, rolling
from .data import ArrayStore, Domain, Stream, StreamSpec, excerpt, open_dataset
from .data.store import digest_file
from .models import Classifier
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
    with progress("five methods at five attack rates") as tick:
        rows = _rows(setting, folder / "runs", seed, tick)
    with atomic_write(folder / "results.jsonl") as file:
        file.writelines(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows.values())
    clean, fooled = (accuracy(surrogate, images, domain.labels) for images in (domain.images, attacked))
    found = Demo(rows, (clean, fooled), folder / "report.html")
    shown = _one_attacked_image(source, domain, attacked, seed)
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


def _one_attacked_image(
    source: Classifier, domain: Domain, attacked: np.ndarray[Any, Any], seed: int
) -> list[report.View]:
    """An image whose attacked original is misread and whose pooled views are not, after a few adapted batches."""
    method = adapt(source, "tent", seed=seed)
    stream = Stream([domain], StreamSpec(attack_rate=100, seed=seed), [attacked])
    candidates = []
    for number, batch in enumerate(stream):
        draw = method.predictor.draw(batch.images)
        prediction = method.predictor(batch.images, draw, track=False).detach()
        report_on = prediction.report
        assert report_on.view_probs is not None  # SAFER always reports both
        assert report_on.dropped is not None
        saved = (prediction.labels == batch.labels) & (report_on.view_probs[0].argmax(dim=1) != batch.labels)
        if number and int(report_on.dropped) == 0 and saved.any():
            index = int((saved * prediction.probs.amax(dim=1)).argmax())
            candidates.append((float(prediction.probs[index].amax()), number, index, batch, draw, prediction))
        method(batch.images)
    if not candidates:
        return []
    _, number, index, batch, draw, prediction = max(candidates, key=lambda c: c[0])
    place = number * stream.spec.batch + index
    original = domain.images[stream.order[place, 1]]
    return _views(original, source, batch, index, draw, prediction, domain.classes)


def _views(
    original: np.ndarray[Any, Any],
    source: Classifier,
    batch: Any,
    index: int,
    draw: Any,
    prediction: Any,
    classes: tuple[str, ...],
) -> list[report.View]:
    label, said = int(batch.labels[index]), prediction.report
    with torch.no_grad():
        clean = source(torch.from_numpy(np.array(original))[None].float() / 255)[1].softmax(1)[0]
    answer = int(clean.argmax())
    shown = [report.View(original, f"clean: {classes[label]}", classes[answer], float(clean[answer]), answer == label)]
    pictures = (draw.views(batch.images.float() / 255)[:, index] * 255).round().byte().numpy()
    for view, picture in enumerate(pictures):
        probs = said.view_probs[view, index]
        answer = int(probs.argmax())
        shown.append(
            report.View(
                picture,
                "attacked original" if view == 0 else f"view {view}",
                classes[answer],
                float(probs[answer]),
                answer == label,
                reliability=float(said.reliability[view]),
                weight=float(said.weights[view, index]),
                dropped=int(said.dropped) == view,
                operators=said.pipelines[view - 1] if view else (),
            )
        )
    return shown


def _page(found: Demo, target: str, shown: list[report.View]) -> str:
    by_rate = {row.label: (list(RATES), [found.rows[row.label, rate]["accuracy"] for rate in RATES]) for row in ROWS}
    over_time = {}
    for row in ROWS:
        curve = rolling(found.rows[row.label, 100]["batch_accuracy"], ROLLING)
        over_time[row.label] = (list(range(1, len(curve) + 1)), curve)
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
                (figures.lines(by_rate, x="attacked, % of each batch", title="against the attack rate"), "by rate"),
                (
                    figures.lines(over_time, x="batch", title=f"all attacked, mean of {ROLLING} batches"),
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
