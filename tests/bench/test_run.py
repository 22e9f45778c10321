import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from safer_tta import adapt, load_classifier
from safer_tta._internal.seeds import generator
from safer_tta.attacks import aware, eot_pgd, pgd, transfer
from safer_tta.bench.experiment import Experiment
from safer_tta.bench.graph import graph, size_for
from safer_tta.bench.plan import Cell, Row
from safer_tta.bench.tasks import QUICK_COUNT, Place, execute, materials
from safer_tta.data import Stream, StreamSpec, excerpt
from safer_tta.training.trainer import accuracy

SEED, IMAGES, BATCH = 1, 32, 16  # seed 0 would hide that a part does not get the seed


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("store"), count=QUICK_COUNT)


@dataclass
class Asked:
    """A row of a plan, and the few lines of the library that should give the same."""

    row: dict[str, Any] = field(default_factory=dict)
    adapt: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    threat: dict[str, Any] = field(default_factory=dict)
    size: dict[str, Any] = field(default_factory=dict)


TENT = {"method": "tent", "options": {"lr": 0.01}}
PLAIN = {"method": "tent", "predictor": "plain", "lr": 0.01}
SAME = [("norm", "medbn"), ("predictor", "safer"), ("predictor", "safer-g")]
STREAMS = [{"draw": "bernoulli"}, {"draw": "late"}, {"order": "correlated"}, {"batch": 8}]
ASKED = {
    "tent": Asked(),
    "options": Asked({"options": {"lr": 0.05}}, {"lr": 0.05}),
    **{same: Asked({what: same}, {what: same}) for what, same in SAME},
    "predictor_options": Asked(
        {"predictor": "safer", "predictor_options": {"views": 2}}, {"predictor": {"name": "safer", "views": 2}}
    ),
    **{str(stream): Asked({"stream": stream}, stream=stream) for stream in STREAMS},
    "budget": Asked({"attack": {"eps": 2, "steps": 3}}, threat={"eps": 2 / 255, "steps": 3}),
    "precision": Asked(adapt={"precision": "bfloat16"}, size={"precision": "bfloat16"}),
}


def carried_out(place, row, **size):
    """The tasks of one cell, done; by kind."""
    cell = Cell(0, Row(label="x", **{**TENT, **row}), "sketch", 50, SEED)
    small = dataclasses.replace(size_for("synthetic", quick=True), images=IMAGES, batch=BATCH, **size)
    made, _ = graph([cell], place.dataset(), small)
    for task in made:
        execute(task, place)
    return {task.kind: task for task in made}


def by_hand(tasks, place, asked):
    """What the run should give: probabilities, labels, and which images were attacked."""
    sketch = excerpt(place.dataset().domain("sketch"), IMAGES, SEED)
    precision = asked.size.get("precision", "float32")
    surrogate = load_classifier(tasks["surrogate"].path(place))
    surrogate.accelerate(precision=precision)
    threat = {"eps": 8 / 255, "step": 2 / 255, "steps": 2, **asked.threat}  # quick: a tenth of the paper's steps
    images, labels = torch.from_numpy(sketch.images), torch.from_numpy(sketch.labels)
    copies = pgd(surrogate, images, labels, generator=generator(SEED, "attack", 0), **threat)
    settings = {"batch": BATCH, "attack_rate": 50, "seed": SEED, **asked.stream}
    kept = np.ascontiguousarray((copies * 255).round().byte())  # as the store lays them out: it decides the last digits
    stream = Stream([sketch], StreamSpec(**settings), [kept])
    method = adapt(load_classifier(tasks["source"].path(place)), seed=SEED, **{**PLAIN, **asked.adapt})
    answers = [(method(batch.images).probs, batch.labels, batch.attacked) for batch in stream]
    probs, labels, attacked = map(torch.cat, zip(*answers, strict=True))
    return probs.double(), labels, attacked


@pytest.mark.parametrize("name", ASKED)
def test_a_run_is_what_its_row_of_the_plan_asks_for(name, place):
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


EOT = {"name": "eot", "draws": 2, "steps": 5}


def to_be_attacked(tasks, place):
    """A stream of which half is still to be attacked."""
    sketch = excerpt(place.dataset().domain("sketch"), IMAGES, SEED)
    return Stream([sketch], StreamSpec(**tasks["run"].definition["stream"]), [sketch.images])


def test_a_live_attack_hits_the_images_that_the_stream_chooses(place):
    """Nearly every attacked image is misread. A model that does not adapt answers the others as before."""
    tasks = carried_out(place, {"method": "none", "options": {}, "attack": EOT})
    row = place.results.row(tasks["run"].name)
    calm = [(b.images[~b.attacked], b.labels[~b.attacked]) for b in to_be_attacked(tasks, place)]
    images, labels = map(torch.cat, zip(*calm, strict=True))
    assert row["attack"] == "eot"
    assert row["accuracy_attacked"] < 10
    assert row["accuracy_clean"] == pytest.approx(
        accuracy(load_classifier(tasks["source"].path(place)), images, labels)
    )
    assert row["accuracy_clean"] > 10


@pytest.mark.parametrize(
    "attack",
    [{"name": "eot-margin", "draws": 1, "restarts": 2, "steps": 3, "step": 4}, {"name": "apgd-eot", "draws": 1}],
    ids=lambda attack: attack["name"],
)
def test_stronger_live_attacks_take_their_options_from_a_plan(attack, place):
    row = place.results.row(carried_out(place, {"method": "none", "options": {}, "attack": attack})["run"].name)
    assert row["attack"] == attack["name"]
    assert row["threat"]["draws"] == 1
    assert row["accuracy_attacked"] < 10
    assert row["accuracy_clean"] > 10


@pytest.mark.parametrize(
    ("attack", "options"),
    [(transfer, {"diversity": 1.0, "target": "next"}), (aware, {"defence": "safer-g", "draws": 2, "momentum": 1.0})],
)
def test_stronger_attacks_on_a_surrogate_take_their_options_from_a_plan(attack, options, place):
    tasks = carried_out(place, {"attack": {"name": attack.__name__, "steps": 2, **options}})
    found = materials(Experiment.from_description(tasks["run"].definition), place)
    sketch, surrogate = found.domains[0], load_classifier(tasks["surrogate"].path(place))
    images, labels = torch.from_numpy(np.array(sketch.images)), torch.from_numpy(sketch.labels)
    expected = attack(surrogate, images, labels, steps=2, generator=generator(SEED, "attack", 0), **options)
    assert torch.equal(torch.from_numpy(np.array(found.attacked[0])), (expected * 255).round().byte())


def test_a_poisoning_attack_harms_the_images_that_it_leaves_alone(place):
    """With batch statistics; a model that normalises with those of the source answers them as before."""
    poison = {"name": "dia", "eps": 255, "step": 8, "steps": 10}
    benign = {}
    for method in ("none", "bn"):
        for name, attack in (("calm", {**poison, "eps": 0.001, "steps": 1}), ("poisoned", poison)):
            tasks = carried_out(place, {"method": method, "options": {}, "attack": attack})
            benign[method, name] = place.results.row(tasks["run"].name)["accuracy_clean"]
    assert benign["none", "poisoned"] == benign["none", "calm"]
    assert benign["bn", "poisoned"] < benign["bn", "calm"]


def test_a_live_attack_follows_the_updates(place):
    asked = {"predictor": "safer", "options": {"lr": 0.1}, "stream": {"batch": 8}, "attack": EOT}
    tasks = carried_out(place, asked)
    method = adapt(load_classifier(tasks["source"].path(place)), "tent", "safer", seed=SEED, lr=0.1)
    probs = []
    for number, batch in enumerate(to_be_attacked(tasks, place)):
        with method.answering():
            threat = {"draws": 2, "steps": 5, "generator": generator(SEED, "eot", number)}
            perturbed = eot_pgd(method.predictor, batch.images, batch.labels, **threat)
        attacked = (perturbed * 255).round().byte()
        arrived = torch.where(batch.attacked.view(-1, 1, 1, 1), attacked, batch.images)
        probs.append(method(arrived).probs[torch.arange(8), batch.labels].double())
    row = place.results.row(tasks["run"].name)
    assert row["nll"] == pytest.approx(float(-torch.cat(probs).log().mean()), rel=1e-6)


@pytest.mark.parametrize("attack", [{"name": "square", "eps": 48}, {"name": "rays", "eps": 48}])
def test_attacks_by_queries_go_through_the_deployed_predictor(place, attack):
    """One query shows images as they are; more of them find some that are misread."""
    right = []
    for queries in (1, 40):
        tasks = carried_out(place, {"method": "none", "options": {}, "attack": {**attack, "queries": queries}})
        assert set(tasks) == {"source", "run"}
        right.append(place.results.row(tasks["run"].name)["accuracy_attacked"])
    assert right[1] < right[0]


def test_a_patch_is_put_into_copies_ahead(place):
    right = []
    for area in (0.001, 0.5):
        tasks = carried_out(
            place, {"method": "none", "options": {}, "attack": {"name": "patch", "area": area, "step": 16}}
        )
        row = place.results.row(tasks["run"].name)
        assert row["threat"]["area"] == area
        assert row["eps"] is None
        assert "eps" not in tasks["attacked"].label
        right.append(row["accuracy_attacked"])
    assert right[1] < right[0]
