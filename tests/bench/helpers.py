"""Small studies, made-up rows, and processes that carry studies out."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safer_tta import executors
from safer_tta.bench import plan
from safer_tta.bench.plan import Cell, Plan
from safer_tta.bench.publish import Study
from safer_tta.bench.results import Row, without
from safer_tta.bench.study import prepare
from safer_tta.bench.tables import Found
from safer_tta.bench.tasks import QUICK_COUNT, Place
from safer_tta.data import Dataset

PLANS = sorted(file.name.removesuffix(".toml") for file in plan.PLANS.iterdir() if file.name.endswith(".toml"))
SMALL = """
title = "Two methods"
[[grids]]
rates = [0, 100]
figure = "bars"
[[grids.rows]]
label = "Tent"
method = "tent"
[[grids.rows]]
label = "Tent+SAFER"
method = "tent"
predictor = "safer"
"""
WORKERS = 1 if "PYTEST_XDIST_WORKER" in os.environ else None  # the other core has tests of its own
PACS = Dataset("pacs", ("art_painting", "cartoon", "photo", "sketch"), tuple("abcdefg"), lambda name: None, "x")
MADE_UP = {
    "accuracy": 50.0, "images": 100, "ms_per_step": 5.0, "images_per_s": 200.0, "peak_mb": None, "device": "none",
    "threads": 1, "precision": "float32", "versions": {},
}  # fmt: skip


def quick(name: str | Path, store: Path, **options: Any) -> tuple[Study, Place]:
    """A plan at its quick size, and where its rows lie."""
    place = Place(store, count=QUICK_COUNT)
    return prepare(str(name), place, quick=True, **options), place


def carry_out(study: Study, place: Place, report: Callable[[executors.Event], None] | None = None) -> dict[str, str]:
    """Execute the tasks of a study in one process of this machine; return what failed."""
    return executors.execute("local", study.tasks, place, report or (lambda event: None), workers=1, threads=1)


def rows_of(study: Study, place: Place) -> dict[str, Row]:
    """The rows of a study by name, without what differs from one execution to the next."""
    return {name: without(place.results.row(name)) for name in study.runs}


def command(plan_file: Path, store: Path, *options: str) -> list[str]:
    """The words after `safer`. One thread, since their number changes the last digits of a sum."""
    return ["bench", str(plan_file), "--quick", "--store", str(store), "--workers", "1", "--threads", "1", *options]


def made_up(
    name: str, *, seeds: int = 3, accuracy: Callable[[Cell], float] = lambda cell: 50.0
) -> tuple[Plan, list[Found]]:
    """A shipped plan on PACS, and rows that no run has made."""
    shipped = plan.load(name)
    return shipped, [
        (cell, {"accuracy": accuracy(cell), "images": 100}) for cell in plan.cells(shipped, PACS, seeds=seeds)
    ]


def kill_workers(command: bytes) -> list[int]:
    """Kill the processes of this command that this process has started, directly or not; return their numbers."""
    running = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            running[int(place.name)] = (parent, (place / "cmdline").read_bytes())
    mine = {os.getpid()}
    while new := {pid for pid, (parent, _) in running.items() if parent in mine} - mine:
        mine |= new
    workers = [pid for pid in mine - {os.getpid()} if command in running[pid][1]]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    return workers
