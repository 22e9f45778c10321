"""Processes of this machine: failures are named, and workers that die are replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from safer_tta import executors
from safer_tta.bench.study import states
from safer_tta.bench.tasks import Task
from tests.bench.helpers import carry_out, descendants, quick, rows_of


def test_an_unknown_executor_is_refused(small, store):
    study, place = quick(small, store)
    with pytest.raises(ValueError, match="'cloud' is unknown; expected one of local, ray"):
        executors.execute("cloud", study.tasks, place, lambda event: None)


def test_a_task_that_fails_is_named_and_the_others_are_carried_out(small, tmp_path):
    study, place = quick(small, tmp_path / "s")
    source = next(task for task in study.tasks if task.kind == "source")
    surrogate = next(task for task in study.tasks if task.kind == "surrogate")
    surrogate.path(place).parent.mkdir(parents=True)
    surrogate.path(place).write_bytes(b"not a model")
    failed = carry_out(study, place)
    assert source.done(place)
    assert states(study, place) == {"done": 2, "not started": 2}  # the clean streams need no surrogate
    attacked = [label for label in failed if label.startswith("pgd of")]
    assert "TensorFileError" in failed[attacked[0]]
    assert sum("which failed" in why for why in failed.values()) == 2


def test_a_worker_that_dies_is_replaced(small, undisturbed, tmp_path):
    study, place = quick(small, tmp_path)
    killed = []

    def report(event: executors.Event) -> None:
        if event.what == "started" and event.task.kind == "run" and not killed:
            workers = [child for child, line in descendants().items() if b"spawn_main" in line]
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            killed.extend(workers)

    assert carry_out(study, place, report) == {}
    assert killed
    assert rows_of(study, place) == undisturbed


class Deadly(Task):
    """Kills every process that carries it out, and none that hands it out."""

    def done(self, place):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def test_a_task_that_kills_its_workers_is_tried_three_times(small, tmp_path):
    """Then it is named, and the others are carried out."""
    study, place = quick(small, tmp_path)
    first, tasks = study.runs[0], list(study.tasks)
    for place_in_list, task in enumerate(tasks):
        if task.name == first:
            tasks[place_in_list] = Deadly(task.kind, task.label, task.definition, task.needs)
    died = []

    def report(event: executors.Event) -> None:
        if event.what == "retried":
            died.append(event.task.name)
            assert len(died) < 5, "tried again and again"

    failed = executors.execute("local", tasks, place, report, workers=1, threads=1)
    assert died == [first] * 2
    (why,) = failed.values()
    assert "worker died" in why
    assert "3 times" in why
    assert states(study, place) == {"done": 3, "not started": 1}
