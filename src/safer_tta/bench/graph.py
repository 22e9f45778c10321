"""From the cells of a plan to tasks: what must be trained and attacked before which run, and how large it all is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import extensions, methods, predictors
from ..api import split_name
from ..attacks import ATTACKS
from ..data import Dataset
from ..data.store import digest
from ..methods.registry import settings
from ..models import Classifier, zoo
from ..models.classifier import check_precision
from ..training import Recipe, full_threat, robust, source_recipe, surrogate_recipe
from .plan import Attack, Cell, PlanError, Row
from .tasks import Task, hash_of

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
    precision: str = "float32"  # of attacks and runs; a GPU always trains in bfloat16

    def __post_init__(self) -> None:
        check_precision(self.precision)

    def described(self) -> dict[str, str]:
        """What of it belongs into a definition: those written before there was a choice have none."""
        return {} if self.precision == "float32" else {"precision": self.precision}


def size_for(
    dataset: str,
    *,
    quick: bool = False,
    images: int | None = None,
    steps: int | None = None,
    robust_steps: int | None = None,
    precision: str = "float32",
    **changes: Any,
) -> Size:
    """The paper's sizes; those of the embedded data, an hour of two cores; or quick ones, to see everything work."""
    if quick:
        own = {} if {"architecture", "weights"} & set(changes) else {"architecture": "small"}  # which has weights
        tiny = {**own, **changes, "steps": 10, "batch": 8, "every": 10}
        source = source_recipe(dataset, **tiny)
        attacked = robust(dataclasses.replace(source, steps=3, every=3), steps=1)
        return Size(source, attacked, surrogate_recipe(dataset, **tiny), images or 32, 16, 2, 1, precision)
    wanted = {**changes} if steps is None else {**changes, "steps": steps}
    source = source_recipe(dataset, **wanted)
    embedded = dataset == "synthetic"
    # Three attack steps, and on the embedded data a third of the training: the price of Robust ERM is its attacks.
    shorter = robust_steps or (source.steps // 3 if embedded else source.steps)
    hardened = dataclasses.replace(source, steps=shorter)
    surrogate = surrogate_recipe(dataset, **changes) if embedded else surrogate_recipe(dataset, **wanted)
    images = images or (512 if embedded else None)
    return Size(source, robust(hardened, steps=3), surrogate, images, precision=precision)


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
        name, _ = split_name(row.method)
        try:
            methods.create(name, _predictor(row, _tiny()), **row.options)
        except (TypeError, ValueError) as error:
            raise PlanError(f"row {row.label!r}: {error}") from error


def _tiny() -> Classifier:
    return Classifier(zoo.create("small", num_classes=7))


_looked_at = functools.cache(_tiny)  # one is enough where nothing is learnt


def _predictor(row: Row, classifier: Classifier) -> predictors.Predictor:
    return predictors.create(row.predictor, classifier, seed=0, **row.predictor_options)


def _resolved(row: Row) -> dict[str, Any]:
    """Method and predictor with every option spelt out: a default and the same value given are one run."""
    return {
        "method": row.method,
        "options": settings(split_name(row.method)[0], row.options),
        "predictor": row.predictor,
        "predictor_options": _predictor(row, _looked_at()).settings,
    }


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
        images = self._images(targets)
        definition = {
            "dataset": self.dataset.identity,
            "target": self.cell.target,
            "images": images,
            **_resolved(row),
            "source": source.definition,
            "attack": attack,
            "stream": {
                "order": row.stream.order,
                "draw": row.stream.draw,
                "batch": row.stream.batch or self.size.batch,
                "attack_rate": self.cell.attack_rate,
                "seed": self.cell.seed,
            },
            **self.size.described(),
        }
        definition |= extensions.code(definition)
        settings = [f"{place.rpartition('.')[2]} {value}" for place, value in self.cell.varied.items()]
        where = f"on {self.cell.target}, {self.cell.attack_rate:g} %, seed {self.cell.seed}"
        label = ", ".join([f"{row.label} {where}", *settings])
        needs = tuple(task.name for task in before)
        run = Task("run", label, definition, needs, self._run_passes(row, (images or 2000) * len(targets)))
        return [*before, run]

    def _images(self, targets: list[str]) -> int | None:
        """Of each domain of a stream."""
        if self.size.images is not None and self.size.images < len(targets):
            raise PlanError(f"{self.size.images} images for {len(targets)} domains; expected one of each at least")
        return None if self.size.images is None else self.size.images // len(targets)

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
            images = self._images(targets)
            definition = {
                "attack": name,
                "threat": threat,
                "surrogate": trained,
                "images": images,
                "seed": self.cell.seed,
                **self.size.described(),
                **extensions.code_of(ATTACKS[name].make),
            }
            effort = ATTACKS[name].passes * (1 if ATTACKS[name].own_steps else int(threat["steps"]))
            label = f"{name} of {target}, eps {attack.eps:g}/255, seed {self.cell.seed}"
            attacked = Task("attacked", label, definition, (surrogate.name,), effort * (images or 2000))
            needed += [surrogate, attacked]
            made.append(definition)
        return {"name": name, "threat": threat, "copies": made}, needed

    def _described(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe by content: weights by their hash, not by where they lie; the seed of this cell on top."""
        described = dataclasses.asdict(recipe)
        described["seed"] += self.cell.seed
        described["weights"] = None if recipe.weights is None else hash_of(recipe.weights)
        return described

    def _run_passes(self, row: Row, images: int) -> float:
        views = 1 + row.predictor_options.get("views", 4) if row.predictor.startswith("safer") else 1
        passes = methods.METHODS[split_name(row.method)[0]].cost.passes * views
        if row.attack.name == "eot" and self.cell.attack_rate > 0:
            passes += 3 * views * row.attack.draws * (row.attack.steps or self.size.eot_steps)
        return images * passes


def _threat(attack: Attack, steps: int) -> dict[str, Any]:
    threat = {"eps": attack.eps / LEVELS, "norm": attack.norm}
    if attack.name in ATTACKS and ATTACKS[attack.name].own_steps:
        return threat
    step = {} if attack.step is None else {"step": attack.step / LEVELS}
    return full_threat(**threat, steps=attack.steps or steps, **step)
