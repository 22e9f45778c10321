"""Execute tasks on a Ray cluster (extra `[ray]`). The store must be in a folder that every node can reach."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..bench.tasks import Place, Task, attempt
from ..errors import MissingPackageError
from . import ATTEMPTS, Event, Schedule


def carry_out(
    schedule: Schedule,
    place: Place,
    *,
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
) -> None:
    """Execute every task of a schedule, on the cluster at an address or else with workers that are started here."""
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError("this executor needs ray: pip install 'safer-tta[ray]'") from error
    place = _absolute(place)
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=address, num_cpus=workers if address is None else None, log_to_driver=False)
    gpus = 1 if place.device.startswith("cuda") else 0
    # Ray itself repeats a task whose worker died.
    remote = ray.remote(max_retries=ATTEMPTS - 1, num_cpus=threads or 1, num_gpus=gpus)(_work)
    running: dict[Any, Task] = {}
    try:
        while True:
            while (task := schedule.next()) is not None:
                running[remote.remote(task, place, threads or 1)] = task
                schedule.report(Event("started", task))
            if not running:
                return
            for done in ray.wait(list(running))[0]:
                _finish(schedule, running.pop(done), done, ray)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()


def _absolute(place: Place) -> Place:
    """Return the place with absolute paths, since workers start in other folders."""
    data = place.data if place.data == "synthetic" else str(Path(place.data).resolve())
    weights = None if place.weights is None else str(Path(place.weights).resolve())
    return dataclasses.replace(place, store=place.store.resolve(), data=data, weights=weights)


def _finish(schedule: Schedule, task: Task, reference: Any, ray: Any) -> None:
    try:
        why = ray.get(reference)
    except ray.exceptions.RayError as error:
        why = f"its worker died: {error}"
    schedule.end(task, why)


def _work(task: Task, place: Place, threads: int) -> str | None:
    torch.set_num_threads(threads)
    return attempt(task, place)
