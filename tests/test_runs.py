"""From a row of a plan to the row of its run: what was asked for is what is done, and its figures follow by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from safer_tta import adapt
from safer_tta._internal.seeds import generator
from safer_tta.attacks import eot_pgd, pgd
from safer_tta.bench.graph import Size, graph, size_for
from safer_tta.bench.plan import Cell, Row
from safer_tta.bench.run import Record
from safer_tta.bench.tasks import QUICK_COUNT, Place, Task, execute
from safer_tta.data import Stream, StreamSpec, excerpt
from safer_tta.predictors import Prediction, Report
from safer_tta.training import load
from safer_tta.training.trainer import accuracy, recipe_of

SEED, IMAGES, BATCH = 1, 32, 16  # not the seed that everything has when it forgets its own


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("store"), count=QUICK_COUNT)


@dataclass
class Asked:
    """A row of a plan, and the few lines of the library that should come to the same."""

    row: dict[str, Any] = field(default_factory=dict)
    adapt: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    threat: dict[str, Any] = field(default_factory=dict)
    size: dict[str, Any] = field(default_factory=dict)


TENT = {"method": "tent", "options": {"lr": 0.01}}
PLAIN = {"method": "tent", "safer": False, "lr": 0.01}
ASKED = {
    "tent": Asked(),
    "options": Asked({"options": {"lr": 0.05}}, {"lr": 0.05}),
    "medians": Asked({"method": "tent+medbn"}, {"norm": "medbn"}),
    "predictor": Asked({"predictor": "safer"}, {"safer": True}),
    "predictor_options": Asked({"predictor": "safer", "predictor_options": {"views": 2}}, {"safer": {"views": 2}}),
    "bernoulli": Asked({"stream": {"draw": "bernoulli"}}, stream={"draw": "bernoulli"}),
    "late": Asked({"stream": {"draw": "late"}}, stream={"draw": "late"}),
    "correlated": Asked({"stream": {"order": "correlated"}}, stream={"order": "correlated"}),
    "batch": Asked({"stream": {"batch": 8}}, stream={"batch": 8}),
    "budget": Asked({"attack": {"eps": 2, "steps": 3}}, threat={"eps": 2 / 255, "steps": 3}),
    "precision": Asked(adapt={"precision": "bfloat16"}, size={"precision": "bfloat16"}),
}  # fmt: skip


def carried_out(place: Place, row: Mapping[str, Any], rate: float = 50, **size: Any) -> dict[str, Task]:
    """The tasks of one cell, done; by kind."""
    cell = Cell(0, Row(label="x", **{**TENT, **row}), "sketch", rate, SEED)
    made, _ = graph([cell], place.dataset(), quick(**size))
    for task in made:
        execute(task, place)
    return {task.kind: task for task in made}


def quick(**size: Any) -> Size:
    return dataclasses.replace(size_for("synthetic", quick=True), images=IMAGES, batch=BATCH, **size)


def by_hand(tasks: Mapping[str, Task], place: Place, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """What the run should have come to: probabilities, labels, and who was attacked."""
    sketch = excerpt(place.dataset().domain("sketch"), IMAGES, SEED)
    precision = asked.size.get("precision", "float32")
    surrogate = load(tasks["surrogate"].path(place))
    surrogate.accelerate(precision=precision)
    threat = {"eps": 8 / 255, "step": 2 / 255, "steps": quick().attack_steps, **asked.threat}
    images, labels = torch.from_numpy(sketch.images), torch.from_numpy(sketch.labels)
    copies = pgd(surrogate, images, labels, generator=generator(SEED, "attack", 0), **threat)
    settings = {"batch": BATCH, "attack_rate": 50, "seed": SEED, **asked.stream}
    kept = np.ascontiguousarray((copies * 255).round().byte())  # as the store lays them out: it decides the last digits
    stream = Stream([sketch], StreamSpec(**settings), [kept])
    method = adapt(load(tasks["source"].path(place)), seed=SEED, **{**PLAIN, **asked.adapt})
    answers = [(method(batch.images).probs, batch.labels, batch.attacked) for batch in stream]
    probs, labels, attacked = map(torch.cat, zip(*answers, strict=True))
    return probs.double(), labels, attacked


@pytest.mark.parametrize("name", ASKED)
def test_a_run_is_what_its_row_of_the_plan_asks_for(name: str, place: Place) -> None:
    """Beside the same in a few lines of the library; and unlike the run that asks for nothing in particular."""
    asked = ASKED[name]
    tasks = carried_out(place, asked.row, **asked.size)
    row = place.results.row(tasks["run"].name)
    probs, labels, attacked = by_hand(tasks, place, asked)
    right = probs.argmax(dim=1) == labels
    assert row["nll"] == pytest.approx(float(-probs[torch.arange(IMAGES), labels].log().mean()), rel=1e-6)
    assert row["accuracy"] == pytest.approx(100 * float(right.double().mean()))
    assert row["accuracy_attacked"] == pytest.approx(100 * float(right[attacked].double().mean()))
    assert row["attacked_share"] == pytest.approx(100 * float(attacked.double().mean()))
    usual = place.results.row(carried_out(place, {})["run"].name)
    assert (row["nll"] == usual["nll"]) == (name == "tent")


def test_a_source_model_has_not_seen_its_target(place: Place) -> None:
    for target in ("sketch", "cartoon+sketch"):
        row = Row(label="x", stream={"order": "mixed" if "+" in target else "shuffled"})
        made, _ = graph([Cell(0, row, target, 0, SEED)], place.dataset(), quick())
        source = next(task for task in made if task.kind == "source")
        execute(source, place)
        assert set(recipe_of(source.path(place))["domains"]) == set(place.dataset().domains) - set(target.split("+"))


EOT = {"name": "eot", "draws": 2, "steps": 5}


def to_be_attacked(tasks: Mapping[str, Task], place: Place) -> Stream:
    """A stream of which a half is to be attacked by whoever reads it."""
    sketch = excerpt(place.dataset().domain("sketch"), IMAGES, SEED)
    return Stream([sketch], StreamSpec(**tasks["run"].definition["stream"]), [sketch.images])


def test_the_attacker_who_knows_the_defence_attacks_whom_the_stream_says(place: Place) -> None:
    """Nearly every attacked image falls; the others arrive as they are, so a model that does not adapt answers them
    as ever."""
    tasks = carried_out(place, {"method": "none", "options": {}, "attack": EOT})
    row = place.results.row(tasks["run"].name)
    calm = [(b.images[~b.attacked], b.labels[~b.attacked]) for b in to_be_attacked(tasks, place)]
    images, labels = map(torch.cat, zip(*calm, strict=True))
    assert row["attack"] == "eot"
    assert row["accuracy_attacked"] < 10
    assert row["accuracy_clean"] == pytest.approx(accuracy(load(tasks["source"].path(place)), images, labels))
    assert row["accuracy_clean"] > 10


def test_the_attacker_who_knows_the_defence_follows_its_updates(place: Place) -> None:
    """Batch by batch he attacks the method as it has become, views and all."""
    asked = {"predictor": "safer", "options": {"lr": 0.1}, "stream": {"batch": 8}, "attack": EOT}
    tasks = carried_out(place, asked)
    method = adapt(load(tasks["source"].path(place)), seed=SEED, lr=0.1)
    probs = []
    for number, batch in enumerate(to_be_attacked(tasks, place)):
        with method.answering():
            perturbed = eot_pgd(
                method.predictor, batch.images, batch.labels, draws=2, steps=5, generator=generator(SEED, "eot", number)
            )
        attacked = (perturbed * 255).round().byte()
        arrived = torch.where(batch.attacked.view(-1, 1, 1, 1), attacked, batch.images)
        probs.append(method(arrived).probs[torch.arange(8), batch.labels].double())
    row = place.results.row(tasks["run"].name)
    assert row["nll"] == pytest.approx(float(-torch.cat(probs).log().mean()), rel=1e-6)


# --- the figures of a row, recomputed image by image ----------------------------------------------------------------

CLASSES, VIEWS = 3, 3
DROPPED = [-1, 0, 2, 2, 2]  # view 1 never is


@dataclass(frozen=True)
class Seen:
    """One image, as a row's figures see it."""

    probs: list[float]
    label: int
    attacked: bool
    suspicion: float

    @property
    def right(self) -> bool:
        return max(self.probs) == self.probs[self.label]


Recorded = tuple[dict[str, Any], list[list[Seen]]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """(the figures of a made-up run, its batches): a quarter attacked, some equally suspicious, a short last batch."""
    randomness, record, batches = torch.Generator().manual_seed(0), Record(), []
    for number in range(19):
        size = 3 if number == 18 else 8
        probs = (2 * torch.randn(size, CLASSES, generator=randomness)).softmax(dim=1)
        labels = torch.randint(CLASSES, (size,), generator=randomness)
        attacked = torch.rand(size, generator=randomness) < 0.25
        suspicion = (10 * torch.rand(size, generator=randomness)).round() / 10
        report = Report(
            torch.full((VIEWS, size), 1 / VIEWS),
            reliability=torch.tensor([0.0, 0.5, number / 18]),
            dropped=torch.tensor(DROPPED[number % 5]),
            signal=suspicion,
        )
        # The first batch is slow, as on a machine that warms up.
        record.add(Prediction(probs, probs.log(), probs, report), labels, attacked, number / 10 or 9.0)
        told = zip(probs.tolist(), labels.tolist(), attacked.tolist(), suspicion.tolist(), strict=True)
        batches.append([Seen(*image) for image in told])
    return record.figures(CLASSES), batches


def percent(images: list[Seen]) -> float:
    return 100 * statistics.mean(image.right for image in images)


def test_accuracies_by_hand(recorded: Recorded) -> None:
    figures, batches = recorded
    images = [image for batch in batches for image in batch]
    attacked = [image for image in images if image.attacked]
    assert (figures["images"], figures["batches"]) == (len(images), 19)
    assert figures["accuracy"] == pytest.approx(percent(images))
    assert figures["attacked_share"] == pytest.approx(100 * len(attacked) / len(images))
    assert figures["accuracy_attacked"] == pytest.approx(percent(attacked))
    assert figures["accuracy_clean"] == pytest.approx(percent([image for image in images if not image.attacked]))
    of_class = [[image for image in images if image.label == k] for k in range(CLASSES)]
    assert figures["per_class"] == pytest.approx([percent(some) for some in of_class])
    assert figures["batch_accuracy"] == pytest.approx([percent(batch) for batch in batches])


def test_the_rolling_curve_is_over_the_last_sixteen_batches(recorded: Recorded) -> None:
    figures, batches = recorded
    each = [percent(batch) for batch in batches]
    assert figures["rolling"][:3] == pytest.approx([each[0], sum(each[:2]) / 2, sum(each[:3]) / 3])
    assert figures["rolling"][15:] == pytest.approx([sum(each[i : i + 16]) / 16 for i in range(4)])


def test_calibration_by_hand(recorded: Recorded) -> None:
    """Negative log-likelihood, and the gap between confidence and accuracy over fifteen equal bins."""
    figures, batches = recorded
    images = [image for batch in batches for image in batch]
    assert figures["nll"] == pytest.approx(statistics.mean(-math.log(image.probs[image.label]) for image in images))
    bins: dict[int, list[Seen]] = {}
    for image in images:
        bins.setdefault(int(15 * max(image.probs)), []).append(image)
    gaps = [abs(sum(image.right - max(image.probs) for image in some)) for some in bins.values()]
    assert figures["ece"] == pytest.approx(sum(gaps) / len(images))


def test_views_and_times_by_hand(recorded: Recorded) -> None:
    """The time of a step is the median without the first, which warms up."""
    figures, batches = recorded
    dropped = [DROPPED[number % 5] for number in range(19)]
    assert figures["dropped_share"] == pytest.approx([dropped.count(view) / 19 for view in range(VIEWS)])
    assert figures["reliability"] == pytest.approx([0.0, 0.5, 0.5])
    median = statistics.median_low(number / 10 for number in range(1, 19))
    assert figures["ms_per_step"] == pytest.approx(1000 * median)
    assert figures["images_per_s"] == pytest.approx(statistics.mean(map(len, batches)) / median)


def test_detection_and_selection_by_hand(recorded: Recorded) -> None:
    """How often an attacked image is more suspicious than a clean one, ties counting half; and the accuracy on the
    least suspicious 100, 90, ... 50 %."""
    figures, batches = recorded
    images = [image for batch in batches for image in batch]
    pairs = [(a.suspicion, c.suspicion) for a in images for c in images if a.attacked and not c.attacked]
    assert figures["detection"] == pytest.approx(statistics.mean((a > c) + 0.5 * (a == c) for a, c in pairs))
    assert figures["detection"] != pytest.approx(0.5, abs=1e-3)
    ordered = sorted(images, key=lambda image: image.suspicion)
    expected = [percent(ordered[: round(len(images) * share)]) for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
    assert figures["selective"] == pytest.approx(expected)
