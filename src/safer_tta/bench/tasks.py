"""What a plan takes to carry out: models to train, images to attack, runs; each made once, in whatever process.

A task is plain data, named by the hash of what defines it, so any engine can send it anywhere and ask whether it is
done. What differs between machines (folders, devices, files) is its Place and does not enter the name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import methods, predictors
from ..data import ArrayStore, Dataset, Domain, StreamSpec, excerpt, open_dataset
from ..data.store import digest, digest_file, locked, read_json, write_json
from ..models import zoo
from ..training import (
    Recipe,
    attacked_copies,
    full_threat,
    load,
    robust,
    source_recipe,
    surrogate_recipe,
    train_source,
    train_surrogate,
)
from ..training.trainer import accuracy
from .plan import Attack, Cell, PlanError, Row
from .results import Results
from .run import Run, Setting, Tick, perform

LEVELS = 255


@dataclass(frozen=True)
class Size:
    """How large everything is. Recipes are for seed 0; every seed trains its own models."""

    source: Recipe
    robust: Recipe
    surrogate: Recipe
    images: int | None = None  # of each stream; None: the whole domain
    batch: int = 64
    attack_steps: int = 20
    eot_steps: int = 10


@dataclass(frozen=True)
class Place:
    """Where tasks are carried out: the store that everything is written to, the data, the device."""

    store: Path
    data: str = "synthetic"
    side: int = 224
    count: int = 1400
    cache: Path | None = None
    weights: str | None = None
    device: str = "cpu"

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


def size_for(
    dataset: str, *, quick: bool = False, images: int | None = None, steps: int | None = None, **changes: Any
) -> Size:
    """The paper's sizes; those of the embedded data, an hour of two cores; or quick ones, to see everything work."""
    if quick:
        tiny = {**changes, "steps": 10, "batch": 8, "every": 10}
        source = source_recipe(dataset, **tiny)
        attacked = robust(dataclasses.replace(source, steps=3, every=3), steps=1)
        return Size(source, attacked, surrogate_recipe(dataset, **tiny), images or 32, 16, 2, 1)
    wanted = {**changes} if steps is None else {**changes, "steps": steps}
    source = source_recipe(dataset, **wanted)
    embedded = dataset == "synthetic"
    # Three attack steps, and on the embedded data a third of the training: the price of Robust ERM is its attacks.
    hardened = dataclasses.replace(source, steps=source.steps // 3) if embedded else source
    surrogate = surrogate_recipe(dataset, **changes) if embedded else surrogate_recipe(dataset, **wanted)
    return Size(source, robust(hardened, steps=3), surrogate, images or (512 if embedded else None))


def graph(cells: Sequence[Cell], dataset: Dataset, size: Size) -> tuple[list[Task], list[str]]:
    """Every task of these cells, once, dependencies first; and for each cell the name of its run."""
    tasks: dict[str, Task] = {}
    names = []
    for cell in cells:
        for task in _Builder(dataset, size, cell).tasks():
            tasks.setdefault(task.name, task)
        names.append(task.name)
    return sorted(tasks.values(), key=lambda task: task.kind == "run"), names


def check(cells: Sequence[Cell]) -> None:
    """Build every method and predictor of a plan once, on a tiny network: an option that does not exist is found out
    before anything is trained."""
    for row in {digest(cell.row.model_dump()): cell.row for cell in cells}.values():
        name = row.method.partition("+")[0]
        try:
            predictor = predictors.create(
                row.predictor, zoo.create("small", num_classes=7), seed=0, **row.predictor_options
            )
            methods.create(name, predictor, **row.options)
        except (TypeError, ValueError) as error:
            raise PlanError(f"row {row.label!r}: {error}") from error


class _Builder:
    """The tasks of one cell."""

    def __init__(self, dataset: Dataset, size: Size, cell: Cell) -> None:
        self.dataset, self.size, self.cell = dataset, size, cell

    def tasks(self) -> list[Task]:
        row, source = self.cell.row, self._source()
        targets = self.cell.target.split("+")
        attack, before = None, [source]
        if self.cell.attack_rate > 0:
            attack, needed = self._attack(row.attack, targets)
            before += needed
        images = None if self.size.images is None else self.size.images // len(targets)
        definition = {
            "dataset": self.dataset.identity,
            "target": self.cell.target,
            "images": images,
            **{key: getattr(row, key) for key in ("method", "options", "predictor", "predictor_options")},
            "source": source.definition,
            "attack": attack,
            "stream": {
                "order": row.stream.order,
                "draw": row.stream.draw,
                "batch": row.stream.batch or self.size.batch,
                "attack_rate": self.cell.attack_rate,
                "seed": self.cell.seed,
            },
        }
        label = f"{row.label} on {self.cell.target}, {self.cell.attack_rate:g} %, seed {self.cell.seed}"
        needs = tuple(task.name for task in before)
        run = Task("run", label, definition, needs, self._run_passes(row, (images or 2000) * len(targets)))
        return [*before, run]

    def _source(self) -> Task:
        kind, target = self.cell.row.source, self.cell.target
        recipe = self.size.robust if kind == "robust" else self.size.source
        definition = {"dataset": self.dataset.identity, "without": target.split("+"), "recipe": self._described(recipe)}
        domains = len(self.dataset.domains) - len(definition["without"])
        attack = 3 * recipe.attack["steps"] if recipe.attack else 0
        passes = recipe.steps * recipe.batch * domains * (3 + attack)
        return Task("source", f"{kind} source model without {target}, seed {self.cell.seed}", definition, (), passes)

    def _attack(self, attack: Attack, targets: list[str]) -> tuple[dict[str, Any], list[Task]]:
        threat = _threat(attack, self.size.attack_steps)
        if attack.name == "eot" and attack.draws > 0:
            live = {**_threat(attack, self.size.eot_steps), "draws": attack.draws}
            return {"name": "eot", "threat": live}, []
        name = "pgd" if attack.name == "eot" else attack.name
        needed, made = [], []
        for target in targets:
            recipe = self._described(self.size.surrogate)
            trained = {"dataset": self.dataset.identity, "surrogate": target, "recipe": recipe}
            passes = 3 * recipe["steps"] * recipe["batch"]
            surrogate = Task("surrogate", f"surrogate of {target}, seed {self.cell.seed}", trained, (), passes)
            images = None if self.size.images is None else self.size.images // len(targets)
            definition = {
                "attack": name,
                "threat": threat,
                "surrogate": trained,
                "images": images,
                "seed": self.cell.seed,
            }
            effort = 100 if name == "autoattack" else 3 * threat["steps"]
            label = f"{name} of {target}, eps {attack.eps:g}/255, seed {self.cell.seed}"
            attacked = Task("attacked", label, definition, (surrogate.name,), effort * (images or 2000))
            needed += [surrogate, attacked]
            made.append(definition)
        return {"name": name, "threat": threat, "copies": made}, needed

    def _described(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe by content: weights by their hash, not by where they lie; the seed of this cell on top."""
        described = dataclasses.asdict(recipe)
        described["seed"] += self.cell.seed
        described["weights"] = None if recipe.weights is None else _hash_of(recipe.weights)
        return described

    def _run_passes(self, row: Row, images: int) -> float:
        views = 1 + row.predictor_options.get("views", 4) if row.predictor.startswith("safer") else 1
        passes = _passes(methods.METHODS[row.method.partition("+")[0]].cost) * views
        if row.attack.name == "eot" and self.cell.attack_rate > 0:
            passes += 3 * views * row.attack.draws * (row.attack.steps or self.size.eot_steps)
        return images * passes


@functools.lru_cache(maxsize=8)
def _hash_of(weights: str) -> str:
    return digest_file(weights)


def _passes(cost: str) -> float:
    """Forward passes that a method's cost stands for, a backward one counting two: rough, for estimates only."""
    forward, _, backward = cost.replace("copies", "32").partition("forward")
    return sum(map(int, re.findall(r"\d+", forward))) + 2 * sum(map(int, re.findall(r"\d+", backward)))


def _threat(attack: Attack, steps: int) -> dict[str, Any]:
    budget = {"eps": attack.eps / LEVELS, "steps": attack.steps or steps, "norm": attack.norm}
    return full_threat(**budget) if attack.norm == "l2" else full_threat(**budget, step=attack.step / LEVELS)


# --- carrying out ---------------------------------------------------------------------------------------------------


def execute(task: Task, place: Place, tick: Tick = lambda done, total, **figures: None) -> None:
    """Carry a task out, unless it is done; one process at a time, the others wait and find it done."""
    if task.done(place):
        return
    locks = place.store / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    (place.store / "made").mkdir(exist_ok=True)
    with locked(locks / task.name):
        if not task.done(place):
            KINDS[task.kind](task, place, tick)


def _recipe(described: Mapping[str, Any], place: Place) -> Recipe:
    """A recipe with its weights where they lie on this machine."""
    from ..training.backbone import SHIPPED

    wanted = described["weights"]
    for path in (place.weights, SHIPPED):
        if wanted is not None and path is not None and _hash_of(str(path)) == wanted:
            return Recipe(**{**described, "weights": str(path)})
    if wanted is not None:
        raise ValueError(f"no file here has the weights with hash {wanted}; give them with --weights")
    return Recipe(**described)


def _do_source(task: Task, place: Place, tick: Tick) -> None:
    recipe, target = _recipe(task.definition["recipe"], place), "+".join(task.definition["without"])
    train_source(place.dataset(), target, recipe, task.path(place), device=place.device, report=tick)


def _do_surrogate(task: Task, place: Place, tick: Tick) -> None:
    domain = place.dataset().domain(task.definition["surrogate"])
    recipe = _recipe(task.definition["recipe"], place)
    train_surrogate(domain, recipe, task.path(place), device=place.device, report=tick)


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
    domains, attacked, eot = _stream_of(what, place)
    run = Run(
        method=what["method"],
        predictor=what["predictor"],
        options=what["options"],
        predictor_options=what["predictor_options"],
        stream=StreamSpec(**spec),
        eot=eot,
    )
    source = Task("source", "", what["source"]).path(place)
    threat, name = ({}, "pgd") if attack is None else (attack["threat"], attack["name"])
    setting = Setting(domains, attacked, threat, source, place.device, name)
    perform(run, setting, place.results.folder, defined_by=what, tick=tick)


def _stream_of(what: Mapping[str, Any], place: Place) -> tuple[Any, Any, Any]:
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
    copies = attacked_copies(
        domain,
        load(surrogate).to(place.device),
        ArrayStore(place.store / "attacked"),
        source=digest_file(surrogate),
        attack=definition["attack"],
        threat=dict(definition["threat"]),
        seed=definition["seed"],
        progress=tick,
    )
    return domain, copies, surrogate


def surrogate_facts(tasks: Sequence[Task], place: Place) -> list[dict[str, Any]]:
    """How the attacker's own models fared, clean and attacked, for every stream of attacked images."""
    return [read_json(t.path(place)) for t in tasks if t.kind == "attacked" and t.done(place)]


KINDS = {"source": _do_source, "surrogate": _do_surrogate, "attacked": _do_attacked, "run": _do_run}
