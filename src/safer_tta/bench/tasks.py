"""What a plan takes to carry out: models to train, images to attack, runs; each made once, in whatever process.

A task is plain data and is named by the hash of what defines it, so any executor can send it anywhere and ask whether
it is done. What differs between machines (folders, devices, files) is its Place and does not enter the name.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import extensions
from .._internal.progress import Tick, silent
from .._internal.user_code import explain
from ..attacks import ATTACKS
from ..data import ArrayStore, Dataset, Domain, excerpt, open_dataset
from ..data.store import digest, digest_file, locked, read_json, write_json
from ..errors import InvalidValueError, StoreError
from ..models import load_classifier
from ..training import SHIPPED, Recipe, attacked_copies
from ..training.definitions import ELSEWHERE, hash_weights
from ..training.trainer import accuracy, train
from .experiment import Experiment
from .results import Results
from .run import Materials, perform

FORMAT = "safer-tta.tasks"
FROM_SCRATCH = "none"  # in the place of weights to start from
COUNT, QUICK_COUNT = 1400, 140  # images of each embedded domain, and for quick sizes


@dataclass(frozen=True)
class Place:
    """Where tasks are carried out."""

    store: Path  # the folder that everything is written to
    data: str = "synthetic"  # "synthetic", or the folder of a dataset
    side: int = 224  # pixels a side to which a folder's images are resized
    count: int = COUNT  # images of each embedded domain
    cache: Path | None = None  # where decoded images are kept
    weights: str | None = None  # the file that trainings start from
    device: str = "cpu"  # the device of trainings, attacks and runs
    compile: bool = False  # whether trainings are compiled
    extensions: tuple[str, ...] = ()  # the user's own files

    def dataset(self) -> Dataset:
        return _opened(self.data, side=self.side, count=self.count, cache=self.cache)

    @property
    def results(self) -> Results:
        return Results(self.store / "runs")


_opened = functools.lru_cache(maxsize=2)(open_dataset)


@dataclass(frozen=True)
class Task:
    kind: str  # "source", "surrogate", "attacked" or "run"
    label: str  # what people call it
    definition: Mapping[str, Any]  # what it is named after
    needs: tuple[str, ...] = ()  # the names of the tasks that come first
    passes: float = 0.0  # its cost, in images that go forward through the network

    @functools.cached_property
    def name(self) -> str:
        """The hash of its definition; a run is named as its experiment is."""
        return digest(self.definition if self.kind == "run" else {"kind": self.kind, **self.definition})

    def done(self, place: Place) -> bool:
        return self.path(place).exists()

    def path(self, place: Place) -> Path:
        """Return the file that exists once the task is done."""
        if self.kind == "run":
            return place.results.path(self.name)
        suffix = "json" if self.kind == "attacked" else "safetensors"
        return place.store / "made" / f"{self.kind}-{self.name}.{suffix}"


def left(tasks: Sequence[Task], place: Place) -> list[Task]:
    """Return what is still to be carried out. Models that are needed only by completed runs are skipped."""
    known, wanted = {task.name: task for task in tasks}, set[str]()
    needed = {need for task in tasks for need in task.needs}
    asked = [task.name for task in tasks if task.name not in needed and not task.done(place)]
    while asked:
        name = asked.pop()
        if name not in wanted:
            wanted.add(name)
            asked += known[name].needs
    return [task for task in tasks if task.name in wanted and not task.done(place)]


# --- carrying out ---------------------------------------------------------------------------------------------------


def execute(task: Task, place: Place, tick: Tick = silent) -> None:
    """Carry a task out unless it is done. One process works on it; others wait and find it done."""
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


def attempt(task: Task, place: Place, tick: Tick = silent) -> str | None:
    """Carry a task out and return what went wrong, or None."""
    try:
        execute(task, place, tick)
    except Exception as error:
        return explain(error)
    return None


def _check_data(task: Task, place: Place) -> None:
    """Refuse other data than the task's name stands for."""
    wanted = task.definition["surrogate"] if task.kind == "attacked" else task.definition
    if wanted["data"] != place.dataset().identity:
        raise StoreError(
            f"{task.label} is defined for other data than {place.data!r} (side {place.side}). Give --data, --side and "
            "--quick as they were when it was planned"
        )


def _check_code(task: Task) -> None:
    """Refuse other code than the task's name stands for."""
    here: dict[str, Any] = extensions.code(task.definition) if task.kind == "run" else {}
    if task.kind == "attacked" and task.definition["attack"] in ATTACKS:
        here = extensions.code_of_attack(task.definition["attack"], task.definition["threat"])
    if {key: value for key, value in task.definition.items() if key in ("extension", "extensions")} != here:
        raise StoreError(
            f"{task.label} is defined with other extensions than those here. Give the same files with --extension, "
            "unchanged, or plan again"
        )
    if task.kind == "run" and Experiment.from_description(task.definition).name != task.name:
        raise StoreError(
            f"{task.label} is defined with other versions of its parts than those here. Use the version of safer-tta "
            "that planned it, or plan again"
        )


def _recipe(described: Mapping[str, Any], place: Place) -> Recipe:
    """Return a recipe with its weights where they lie on this machine."""
    wanted = described.get("weights")
    if wanted is None:
        return Recipe(**described)
    for path in (place.weights, SHIPPED):
        given = str(path)
        if given not in ("None", FROM_SCRATCH) and not given.startswith(ELSEWHERE) and hash_weights(given) == wanted:
            return Recipe(**{**described, "weights": given})
    raise InvalidValueError(f"no file on this machine has the weights with hash {wanted}; give it with --weights")


def _train(task: Task, place: Place, tick: Tick) -> None:
    dataset, recipe = place.dataset(), _recipe(task.definition["recipe"], place)
    domains = [dataset.domain(name) for name in dataset.domains if name in task.definition["domains"]]
    train(domains, recipe, task.path(place), device=place.device, compile=place.compile, tick=tick)


def _attack(task: Task, place: Place, tick: Tick) -> None:
    domain, copies, surrogate = _attacked(task.definition, place, tick)
    model = load_classifier(surrogate).to(place.device)
    clean, fooled = (accuracy(model, images, domain.labels) for images in (domain.images, copies))
    found = {"images": len(domain), "surrogate_clean": clean, "surrogate_attacked": fooled}
    write_json(task.path(place), {"definition": task.definition, **found})


def _run(task: Task, place: Place, tick: Tick) -> None:
    experiment = Experiment.from_description(task.definition)
    perform(experiment, materials(experiment, place), place.results.folder, tick=tick)


def materials(experiment: Experiment, place: Place) -> Materials:
    """Return what a store holds for an experiment; attacked copies that are missing are made."""
    source = Task("source", "", experiment.source).path(place)
    made = [_attacked(definition, place) for definition in experiment.copies()]
    if made:
        attacked, copies, _ = zip(*made, strict=True)
        return Materials(attacked, source, copies, place.device)
    domains = tuple(_domain(name, experiment.images, experiment.stream.seed, place) for name in experiment.targets)
    return Materials(domains, source, None, place.device)


def _domain(name: str, images: int | None, seed: int, place: Place) -> Domain:
    domain = place.dataset().domain(name)
    return domain if images is None else excerpt(domain, images, seed)


def _attacked(definition: Mapping[str, Any], place: Place, tick: Tick = silent) -> tuple[Domain, Any, Path]:
    """Return a domain's images, their attacked copies, and the surrogate's file."""
    surrogate = Task("surrogate", "", definition["surrogate"]).path(place)
    domain = _domain(definition["target"], definition["images"], definition["seed"], place)
    model = load_classifier(surrogate).to(place.device)
    model.accelerate(precision=definition.get("precision"))
    settings = {key: definition[key] for key in ("attack", "threat", "seed")}
    store = ArrayStore(place.store / "attacked")
    copies = attacked_copies(domain, model, store, source=digest_file(surrogate), tick=tick, **settings)
    return domain, copies, surrogate


def surrogate_facts(tasks: Sequence[Task], place: Place) -> list[dict[str, Any]]:
    """Return how the attacker's own models fared on clean and on attacked images."""
    facts = []
    for task in (task for task in tasks if task.kind == "attacked" and task.done(place)):
        with contextlib.suppress(StoreError):
            facts.append(read_json(task.path(place)))
    return facts


KINDS = {"source": _train, "surrogate": _train, "attacked": _attack, "run": _run}


# --- tasks that travel to a machine that has torch and little else -------------------------------------------------


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    content = [[t.kind, t.label, t.definition, t.needs, t.passes] for t in tasks]
    write_json(path, {"format": FORMAT, "tasks": content})


def read_tasks(path: Path) -> list[Task]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{path} is not a file of tasks; expected one that `safer bench PLAN --tasks FILE` wrote")
    return [Task(kind, label, what, tuple(needs), passes) for kind, label, what, needs, passes in content["tasks"]]
