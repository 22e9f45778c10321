"""A study is a plan on a dataset: expanded, checked, with its tasks."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import StoreError
from ..training import Recipe
from ..training.trainer import start
from . import plan as plans
from .graph import graph, size_for
from .publish import Study
from .tasks import FROM_SCRATCH, Place, left


def prepare(
    name: str,
    place: Place,
    *,
    seeds: int = 3,
    targets: Sequence[str] = (),
    quick: bool = False,
    images: int | None = None,
    steps: int | None = None,
    robust_steps: int | None = None,
    architecture: str | None = None,
    precision: str = "float32",
    command: str = "",
) -> Study:
    """Expand and check a plan, given by name or file, on the data of a place."""
    plan, dataset = plans.load(name), place.dataset()
    cells = plans.cells(plan, dataset, seeds=seeds, only=targets, quick=quick)
    changes: dict[str, Any] = {} if architecture is None else {"architecture": architecture}
    if place.weights is not None:
        changes["weights"] = None if place.weights == FROM_SCRATCH else place.weights
    sizes = {"images": images, "steps": steps, "robust_steps": robust_steps}
    size = size_for(dataset.name, quick=quick, precision=precision, **sizes, **changes)
    tasks, runs = graph(cells, dataset, size)
    whole = not quick and size.images is None
    return Study(Path(name).stem, plan, dataset.name, cells, tasks, runs, command, whole)


def states(study: Study, place: Place) -> Counter[str]:
    """Count the runs that are done, incomplete, not started or damaged."""
    counted: Counter[str] = Counter()
    for name in dict.fromkeys(study.runs):
        state = place.results.state(name)
        try:
            if state == "done":
                place.results.row(name)
        except StoreError:
            state = "damaged"
        counted[state] += 1
    return counted


def estimate(study: Study, place: Place) -> float:
    """Estimate the seconds that one worker of this machine needs for the rest, from the time of one pass."""
    passes = sum(task.passes for task in left(study.tasks, place))
    recipes = [task.definition["recipe"] for task in study.tasks if task.kind == "source"]
    architecture = recipes[0].get("architecture", Recipe.architecture)  # a definition leaves defaults out
    weights = None if place.weights == FROM_SCRATCH else place.weights
    return passes * _seconds_per_pass(Recipe(architecture=architecture, weights=weights), place) if passes else 0.0


def _seconds_per_pass(recipe: Recipe, place: Place) -> float:
    side = 64 if place.data == "synthetic" else place.side
    model = start(recipe, [""] * 7).eval().to(place.device)
    images = torch.rand(16, 3, side, side, device=place.device)
    times = []
    with torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            float(model(images)[1].sum())
            times.append(time.perf_counter() - started)
    return min(times) / len(images)
