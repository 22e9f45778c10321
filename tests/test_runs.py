"""From a row of a plan to the row of its run: what was asked for is what is done, and its figures follow by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from safer_tta import adapt
from safer_tta.attacks import pgd
from safer_tta.bench.graph import Size, graph, size_for
from safer_tta.bench.plan import Cell, Row
from safer_tta.bench.tasks import QUICK_COUNT, Place, Task, execute
from safer_tta.data import Stream, StreamSpec, excerpt
from safer_tta.seeds import generator
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
    "budget": Asked({"attack": {"eps": 2, "step": 1, "steps": 3}}, threat={"eps": 2 / 255, "step": 1 / 255, "steps": 3}),
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


@pytest.mark.parametrize("method", ["none", "tent"])
def test_the_attacker_who_knows_the_defence_attacks_whom_the_stream_says(method: str, place: Place) -> None:
    """Through the model as it answers, adapted or not, nearly every attacked image falls; the others arrive as they
    are, so a model that does not adapt answers them as ever."""
    options = {"none": {}, "tent": {"lr": 0.01}}[method]
    attack = {"name": "eot", "draws": 1, "steps": 10}
    tasks = carried_out(place, {"method": method, "options": options, "attack": attack})
    row = place.results.row(tasks["run"].name)
    assert row["attack"] == "eot"
    assert row["accuracy_attacked"] < 10
    if method == "none":
        sketch = excerpt(place.dataset().domain("sketch"), IMAGES, SEED)
        spec = StreamSpec(batch=BATCH, attack_rate=50, seed=SEED)
        calm = [(b.images[~b.attacked], b.labels[~b.attacked]) for b in Stream([sketch], spec, [sketch.images])]
        images, labels = map(torch.cat, zip(*calm, strict=True))
        assert row["accuracy_clean"] == pytest.approx(accuracy(load(tasks["source"].path(place)), images, labels))
        assert row["accuracy_clean"] > 10
