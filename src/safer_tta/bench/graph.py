"""From the cells of a plan to tasks: what must be trained and attacked before which run."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..attacks import ATTACKS
from ..data import Dataset, StreamSpec
from ..errors import PlanError
from ..models.classifier import check_precision
from ..training import Recipe, robust, source_recipe, surrogate_recipe
from ..training.definitions import describe_model
from .experiment import AttackOn, Experiment
from .plan import Cell
from .tasks import Task

WHOLE_DOMAIN = 2000  # images, for estimates of time


@dataclass(frozen=True)
class Size:
    source: Recipe  # the recipe of source models for seed 0; every seed trains its own
    robust: Recipe  # the recipe of robust source models
    surrogate: Recipe  # the recipe of the attacker's models
    images: int | None = None  # how many images of each stream; None for the whole domain
    batch: int = 64  # images in a batch
    tail: int | None = None  # how many images at the end are never attacked, at most; None for what a row asks for
    effort: float = 1.0  # the share of an attack's default steps that it takes
    precision: str = "float32"  # the precision of attacks and runs; a GPU always trains in bfloat16

    def __post_init__(self) -> None:
        check_precision(self.precision)


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
    """Return the paper's sizes, those of the embedded data (an hour of two cores), or quick ones for a first look."""
    if quick:
        own = {} if {"architecture", "weights"} & set(changes) else {"architecture": "small"}  # which has weights
        tiny = {**own, **changes, "steps": 10, "batch": 8, "every": 10}
        source = source_recipe(dataset, **tiny)
        attacked = robust(dataclasses.replace(source, steps=3, every=3), steps=1)
        few = images or 32
        return Size(source, attacked, surrogate_recipe(dataset, **tiny), few, 16, few // 8, 0.1, precision)
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
    """Return every task of these cells once, dependencies first, and for each cell the name of its run."""
    per_cell = [_Builder(dataset, size, cell).tasks() for cell in cells]
    tasks: dict[str, Task] = {}
    for task in itertools.chain(*per_cell):
        tasks.setdefault(task.name, task)
    return sorted(tasks.values(), key=lambda task: task.kind == "run"), [made[-1].name for made in per_cell]


class _Builder:
    """The tasks of one cell."""

    def __init__(self, dataset: Dataset, size: Size, cell: Cell) -> None:
        self.dataset, self.size, self.cell = dataset, size, cell
        self.row, self.targets = cell.row, cell.target.split("+")
        if size.images is not None and size.images < len(self.targets):
            raise PlanError(f"{size.images} images for {len(self.targets)} domains; expected at least one of each")
        self.images = None if size.images is None else size.images // len(self.targets)  # of each domain

    def tasks(self) -> list[Task]:
        source = self._source()
        experiment = self._experiment(source.definition)
        try:
            described = experiment.describe()
        except (TypeError, ValueError) as error:  # an option that its method or predictor refuses
            raise PlanError(f"row {self.row.label!r}: {error}") from error
        before = [source, *(task for copies in experiment.copies() for task in self._attacked(copies))]
        where = f"on {self.cell.target}, {self.cell.attack_rate:g} %, seed {self.cell.seed}"
        label = ", ".join([f"{self.row.label} {where}", *self.cell.settings])
        passes = experiment.passes * (self.images or WHOLE_DOMAIN) * len(self.targets)
        return [*before, Task("run", label, described, tuple(task.name for task in before), passes)]

    def _experiment(self, source: Mapping[str, Any]) -> Experiment:
        row, cell = self.row, self.cell
        asked, size = row.stream, self.size
        tail = asked.tail if size.tail is None else min(asked.tail, size.tail)
        order = {**asked.model_dump(), "batch": asked.batch or size.batch, "tail": tail}
        return Experiment(
            data=self.dataset.identity,
            target=cell.target,
            source=source,
            **row.model_dump(include={"method", "predictor", "norm", "options", "predictor_options"}),
            stream=StreamSpec(**order, attack_rate=cell.attack_rate, seed=cell.seed),
            attack=self._attack() if cell.attack_rate > 0 else None,
            images=self.images,
            precision=self.size.precision,
        )

    def _source(self) -> Task:
        recipe = self._seeded(self.size.robust if self.row.source == "robust" else self.size.source)
        domains = [name for name in self.dataset.domains if name not in self.targets]
        attack = 3 * recipe.attack["steps"] if recipe.attack else 0
        passes = recipe.steps * recipe.batch * len(domains) * (3 + attack)
        label = f"{self.row.source} source model without {self.cell.target}, seed {self.cell.seed}"
        return Task("source", label, describe_model(self.dataset.identity, domains, recipe), (), passes)

    def _attack(self) -> AttackOn:
        attack, recipe = self.row.attack, self._seeded(self.size.surrogate)
        surrogates = () if ATTACKS[attack.name].live else self.targets
        described = tuple(describe_model(self.dataset.identity, [name], recipe) for name in surrogates)
        return AttackOn(name=attack.name, threat=attack.threat(self.size.effort), surrogates=described)

    def _attacked(self, copies: Mapping[str, Any]) -> list[Task]:
        """Return the surrogate of a domain, and the copies that are attacked on it."""
        known, recipe = ATTACKS[copies["attack"]], self.size.surrogate
        where = f"{copies['target']}, seed {self.cell.seed}"
        trained = Task("surrogate", f"surrogate of {where}", copies["surrogate"], (), 3 * recipe.steps * recipe.batch)
        passes = known.cost(copies["threat"]) * (self.images or WHOLE_DOMAIN)
        eps = copies["threat"].get("eps")
        label = f"{known.name} of {where}" + ("" if eps is None else f", eps {255 * eps:g}/255")
        return [trained, Task("attacked", label, copies, (trained.name,), passes)]

    def _seeded(self, recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, seed=recipe.seed + self.cell.seed)
