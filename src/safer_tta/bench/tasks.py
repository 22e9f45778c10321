"""What a plan takes to carry out: models to train, images to attack, runs; each made once, in whatever process.

A task is plain data, named by the hash of what defines it, so any engine can send it anywhere and ask whether it is
done. What differs between machines (folders, devices, files) is its Place and does not enter the name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import extensions
from ..attacks import ATTACKS
from ..data import ArrayStore, Dataset, Domain, StoreError, StreamSpec, excerpt, open_dataset
from ..data.store import digest, digest_file, locked, read_json, write_json
from ..training import Recipe, attacked_copies, load, train_source, train_surrogate
from ..training.trainer import accuracy
from .results import Results
from .run import Run, Setting, Tick, perform

FORMAT = "safer-tta.tasks"
FROM_SCRATCH = "none"  # in the place of weights to start from
COUNT, QUICK_COUNT = 1400, 140  # images of each embedded domain, and for quick sizes


@dataclass(frozen=True)
class Place:
    """Where tasks are carried out: the store that everything is written to, the data, the device."""

    store: Path
    data: str = "synthetic"
    side: int = 224
    count: int = COUNT
    cache: Path | None = None
    weights: str | None = None
    device: str = "cpu"
    compile: bool = False  # of trainings
    extensions: tuple[str, ...] = ()

    def dataset(self) -> Dataset:
        return _opened(self.data, self.side, self.count, self.cache)

    @property
    def results(self) -> Results:
        return Results(self.store / "runs")


@functools.lru_cache(maxsize=2)
def _opened(data: str, side: int, count: int, cache: Path | None) -> Dataset:
    return open_dataset(data, side=side, count=count, cache=cache)


@dataclass(frozen=True)
class Task:
    """kind: source, surrogate, attacked or run. needs: the names of the tasks that come first. passes: its cost, as
    images going forward through the network."""

    kind: str
    label: str
    definition: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    passes: float = 0.0

    @functools.cached_property
    def name(self) -> str:
        return digest(self.definition)

    def done(self, place: Place) -> bool:
        return self.path(place).exists()

    def path(self, place: Place) -> Path:
        """The file that is there when the task is done."""
        if self.kind == "run":
            return place.results.path(self.name)
        suffix = "json" if self.kind == "attacked" else "safetensors"
        return place.store / "made" / f"{self.kind}-{self.name}.{suffix}"


def left(tasks: Sequence[Task], place: Place) -> list[Task]:
    """What is still to be carried out: what is asked for itself and not done, and of what that needs what is not there.
    Models that only finished runs needed are nobody's business."""
    known, wanted = {task.name: task for task in tasks}, set[str]()
    needed = {need for task in tasks for need in task.needs}
    asked = [task.name for task in tasks if task.name not in needed and not task.done(place)]
    while asked:
        name = asked.pop()
        if name not in wanted:
            wanted.add(name)
            asked += known[name].needs
    return [task for task in tasks if task.name in wanted and not task.done(place)]


@functools.lru_cache(maxsize=8)
def hash_of(weights: str) -> str:
    """Of a file's content; `hash:…` stands for a file that is not here, to name its runs without it."""
    return weights.removeprefix("hash:") if weights.startswith("hash:") else digest_file(weights)


# --- carrying out ---------------------------------------------------------------------------------------------------


def execute(task: Task, place: Place, tick: Tick = lambda done, total, **figures: None) -> None:
    """Carry a task out, unless it is done; one process at a time, the others wait and find it done."""
    if task.done(place):
        return
    extensions.load(place.extensions)
    _check_data(task, place)
    _check_code(task)
    locks = place.store / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    (place.store / "made").mkdir(exist_ok=True)
    with locked(locks / task.name):
        if not task.done(place):
            KINDS[task.kind](task, place, tick)


def _check_data(task: Task, place: Place) -> None:
    """A name stands for its data as well: on other data the row would be another's."""
    wanted = task.definition.get("surrogate", task.definition) if task.kind == "attacked" else task.definition
    if wanted["dataset"] != place.dataset().identity:
        raise StoreError(
            f"{task.label} is defined for other data than {place.data!r} (side {place.side}). Give --data, --side and "
            "--quick as they were when it was planned"
        )


def _check_code(task: Task) -> None:
    """A name stands for the user's own code as well."""
    here: dict[str, Any] = extensions.code(task.definition) if task.kind == "run" else {}
    if task.kind == "attacked" and task.definition["attack"] in ATTACKS:
        here = extensions.code_of(ATTACKS[task.definition["attack"]].make)
    if {key: value for key, value in task.definition.items() if key in ("extension", "extensions")} != here:
        raise StoreError(
            f"{task.label} is defined with other extensions than those here. Give the same files with --extension, "
            "unchanged, or plan again"
        )


def _recipe(described: Mapping[str, Any], place: Place) -> Recipe:
    """A recipe with its weights where they lie on this machine."""
    from ..training.backbone import SHIPPED

    wanted = described["weights"]
    for path in (place.weights, SHIPPED):
        if wanted is not None and path not in (None, FROM_SCRATCH) and hash_of(str(path)) == wanted:
            return Recipe(**{**described, "weights": str(path)})
    if wanted is not None:
        raise ValueError(f"no file here has the weights with hash {wanted}; give them with --weights")
    return Recipe(**described)


def _do_source(task: Task, place: Place, tick: Tick) -> None:
    recipe, target = _recipe(task.definition["recipe"], place), "+".join(task.definition["without"])
    train_source(place.dataset(), target, recipe, task.path(place), report=tick, **_ways(place))


def _do_surrogate(task: Task, place: Place, tick: Tick) -> None:
    domain = place.dataset().domain(task.definition["surrogate"])
    recipe = _recipe(task.definition["recipe"], place)
    train_surrogate(domain, recipe, task.path(place), report=tick, **_ways(place))


def _ways(place: Place) -> dict[str, Any]:
    """Of training, which change no name."""
    return {"device": place.device, "compile": place.compile}


def _do_attacked(task: Task, place: Place, tick: Tick) -> None:
    domain, copies, surrogate = _attacked(task.definition, place, tick)
    model = load(surrogate).to(place.device)
    clean, fooled = (accuracy(model, images, domain.labels) for images in (domain.images, copies))
    fact = {
        "definition": task.definition,
        "images": len(domain),
        "surrogate_clean": clean,
        "surrogate_attacked": fooled,
    }
    write_json(task.path(place), fact)


def _do_run(task: Task, place: Place, tick: Tick) -> None:
    what, spec = task.definition, task.definition["stream"]
    attack = what["attack"]
    domains, attacked, eot = stream_of(what, place)
    run = Run(
        method=what["method"],
        predictor=what["predictor"],
        options=what["options"],
        predictor_options=what["predictor_options"],
        stream=StreamSpec(**spec),
        eot=eot,
        precision=what.get("precision", "float32"),
    )
    source = Task("source", "", what["source"]).path(place)
    threat, name = ({}, "pgd") if attack is None else (attack["threat"], attack["name"])
    setting = Setting(domains, attacked, threat, source, place.device, name)
    perform(run, setting, place.results.folder, defined_by=what, tick=tick)


def stream_of(what: Mapping[str, Any], place: Place) -> tuple[Any, Any, Any]:
    """(domains, their attacked copies, the live attack): what a run is made on."""
    attack, seed = what["attack"], what["stream"]["seed"]
    if attack is not None and "copies" in attack:
        made = [_attacked(definition, place) for definition in attack["copies"]]
        return tuple(m[0] for m in made), tuple(m[1] for m in made), None
    domains = tuple(_domain(name, what["images"], seed, place) for name in what["target"].split("+"))
    if attack is None:
        return domains, None, None
    return domains, tuple(domain.images for domain in domains), attack["threat"]


def _domain(name: str, images: int | None, seed: int, place: Place) -> Domain:
    domain = place.dataset().domain(name)
    return domain if images is None else excerpt(domain, images, seed)


def _attacked(
    definition: Mapping[str, Any], place: Place, tick: Tick = lambda done, total, **figures: None
) -> tuple[Domain, Any, Path]:
    """(the domain's images, their attacked copies, the surrogate's file); the copies are made if they are not there."""
    trained = definition["surrogate"]
    surrogate = Task("surrogate", "", trained).path(place)
    domain = _domain(trained["surrogate"], definition["images"], definition["seed"], place)
    model = load(surrogate).to(place.device)
    model.accelerate(precision=definition.get("precision"))
    copies = attacked_copies(
        domain,
        model,
        ArrayStore(place.store / "attacked"),
        source=digest_file(surrogate),
        attack=definition["attack"],
        threat=dict(definition["threat"]),
        seed=definition["seed"],
        progress=tick,
    )
    return domain, copies, surrogate


def surrogate_facts(tasks: Sequence[Task], place: Place) -> list[dict[str, Any]]:
    """How the attacker's own models fared, clean and attacked, for every stream of attacked images that says so."""
    facts = []
    for task in tasks:
        if task.kind == "attacked" and task.done(place):
            with contextlib.suppress(StoreError):
                facts.append(read_json(task.path(place)))
    return facts


KINDS = {"source": _do_source, "surrogate": _do_surrogate, "attacked": _do_attacked, "run": _do_run}


# --- tasks that travel, to a machine that has torch and little else -------------------------------------------------


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    content = [[t.kind, t.label, t.definition, t.needs, t.passes] for t in tasks]
    write_json(path, {"format": FORMAT, "tasks": content})


def read_tasks(path: Path) -> list[Task]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{path} holds no tasks; expected a file that `safer bench PLAN --tasks FILE` wrote")
    return [Task(kind, label, what, tuple(needs), passes) for kind, label, what, needs, passes in content["tasks"]]
