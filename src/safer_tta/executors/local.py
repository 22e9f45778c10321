"""Processes of this machine. A worker that dies is replaced, and its task goes on from where it was last saved."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from .._internal.malloc import keep_freed_memory
from ..bench.tasks import Place, Task, execute
from ..errors import InvalidValueError
from ..extensions import told
from . import ATTEMPTS, Event, Schedule


def carry_out(schedule: Schedule, place: Place, *, workers: int | None = None, threads: int | None = None) -> None:
    """Every task of the schedule, on as many workers as the machine has room for; threads: of each."""
    places = _places(place, workers)
    threads = threads or max(1, (os.cpu_count() or 1) // len(places))
    team = [_Worker(place, threads) for place in places]
    try:
        while _hand_out(schedule, team):
            for connection in wait([worker.connection for worker in team if worker.task]):
                worker = next(w for w in team if w.connection is connection)
                _hear(worker, schedule)
    finally:
        for worker in team:
            worker.stop()


def _places(place: Place, workers: int | None) -> list[Place]:
    """One worker for each GPU, or each core: small networks gain more from a second process than a second thread."""
    import torch

    devices = [place.device]
    if place.device == "cuda":
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        if not devices:
            raise InvalidValueError("device is 'cuda' and torch finds none here; expected cpu, or a machine with a GPU")
    count = workers or (len(devices) if place.device != "cpu" else min(os.cpu_count() or 1, 8))
    return [dataclasses.replace(place, device=devices[number % len(devices)]) for number in range(count)]


def _hand_out(schedule: Schedule, team: list[_Worker]) -> bool:
    """Give every idle worker something to do; false when all is done."""
    for worker in team:
        if worker.task is None:
            task = schedule.next()
            if task is None:
                break
            worker.start(task)
            schedule.report(Event("started", task))
    return any(worker.task for worker in team)


def _hear(worker: _Worker, schedule: Schedule) -> None:
    task = worker.task
    assert task is not None
    try:
        kind, *content = worker.connection.recv()
    except (EOFError, OSError):
        _bury(worker, task, schedule)
        return
    if kind == "moved":
        schedule.report(Event("moved", task, *content))
        return
    worker.task, worker.attempts = None, 0
    if kind == "finished":
        schedule.finish(task)
    else:
        schedule.fail(task, *content)


def _bury(worker: _Worker, task: Task, schedule: Schedule) -> None:
    """A worker has died without a word."""
    worker.stop()
    why = f"its worker died (exit code {worker.process.exitcode})"
    worker.attempts += 1
    if worker.attempts < ATTEMPTS:
        schedule.report(Event("retried", task, why=why))
        worker.start(task)
    else:
        worker.task, worker.attempts = None, 0
        schedule.fail(task, f"{why}, {ATTEMPTS} times")


@dataclass
class _Worker:
    """A process and the line to it; started when there is something to do."""

    place: Place
    threads: int
    task: Task | None = None
    attempts: int = 0
    process: Any = None
    connection: Any = None

    def start(self, task: Task) -> None:
        if self.process is None or not self.process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(theirs, self.place, self.threads), daemon=True)
            self.process.start()
            theirs.close()
        self.task = task
        self.connection.send(task)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()


def _work(connection: Connection, place: Place, threads: int) -> None:
    """A worker's life: take a task, carry it out, say so; until the line is closed, also by the other side's death."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that hands out the work
    torch.set_num_threads(threads)
    keep_freed_memory()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return

        def tick(done: int, total: int, **figures: float) -> None:
            connection.send(("moved", done, total))

        try:
            execute(task, place, tick)
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(("failed", told(error)))
        else:
            connection.send(("finished",))
        _let_go(place)


def _let_go(place: Place) -> None:
    """Of a GPU's memory that a task is done with: workers share the GPU, and what one keeps for later, as torch does,
    the others go without."""
    import torch

    if place.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
