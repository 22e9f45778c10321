"""Execute tasks in processes of this machine. A worker that dies is replaced, and its task resumes."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .._internal.malloc import keep_freed_memory
from ..bench.tasks import Place, Task, attempt
from ..errors import InvalidValueError
from . import ATTEMPTS, Event, Schedule


def carry_out(schedule: Schedule, place: Place, *, workers: int | None = None, threads: int | None = None) -> None:
    """Execute every task of a schedule, by default with a worker for each GPU or core; workers share the cores."""
    places = _places(place, workers)
    threads = threads or max(1, (os.cpu_count() or 1) // len(places))
    team = [_Worker(place, threads) for place in places]
    try:
        while _hand_out(schedule, team):
            for connection in wait([worker.connection for worker in team if worker.task]):
                _receive(next(worker for worker in team if worker.connection is connection), schedule)
    finally:
        for worker in team:
            worker.stop()


def _places(place: Place, workers: int | None) -> list[Place]:
    """Return the place of each worker: small networks gain more from a second process than from a second thread."""
    devices = [place.device]
    if place.device == "cuda":
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        if not devices:
            raise InvalidValueError("device is 'cuda' and torch finds none here; expected cpu, or a machine with a GPU")
    count = workers or (len(devices) if place.device != "cpu" else min(os.cpu_count() or 1, 8))
    return [dataclasses.replace(place, device=devices[number % len(devices)]) for number in range(count)]


def _hand_out(schedule: Schedule, team: list[_Worker]) -> bool:
    """Give every idle worker a task; return False when everything is done."""
    for worker in team:
        if worker.task is None:
            task = schedule.next()
            if task is None:
                break
            worker.start(task)
            schedule.report(Event("started", task))
    return any(worker.task for worker in team)


def _receive(worker: _Worker, schedule: Schedule) -> None:
    """Handle one message of a worker, or its death."""
    task = worker.task
    assert task is not None
    try:
        kind, *content = worker.connection.recv()
    except (EOFError, OSError):
        _retry(worker, task, schedule)
        return
    if kind == "moved":
        schedule.report(Event("moved", task, *content))
        return
    worker.task, worker.attempts = None, 0
    schedule.end(task, *content)


def _retry(worker: _Worker, task: Task, schedule: Schedule) -> None:
    """Give the task of a dead worker to a new one, up to the number of attempts."""
    worker.stop()
    why = f"its worker died (exit code {worker.process.exitcode})"
    worker.attempts += 1
    if worker.attempts < ATTEMPTS:
        schedule.report(Event("retried", task, why=why))
        worker.start(task)
    else:
        worker.task, worker.attempts = None, 0
        schedule.end(task, f"{why}, {ATTEMPTS} times")


@dataclass
class _Worker:
    """A process and the pipe to it. It starts with its first task."""

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
    """Execute tasks and report results until the pipe is closed or the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
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
            connection.send(("ended", attempt(task, place, tick)))
        except BrokenPipeError:
            return
        if place.device.startswith("cuda"):  # cached memory is for other workers on the same GPU
            gc.collect()
            torch.cuda.empty_cache()
