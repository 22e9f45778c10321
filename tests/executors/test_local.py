import multiprocessing
import os
import re
import signal

from safer_tta import executors
from safer_tta.bench.study import states
from safer_tta.bench.tasks import Task
from tests.bench.helpers import carry_out, kill_workers, quick, rows_of


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

    def report(event):
        if event.what == "started" and event.task.kind == "run" and not killed:
            killed.extend(kill_workers(b"spawn_main"))

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
    study, place = quick(small, tmp_path)
    first, died = study.runs[0], []
    deadly = {t.name: Deadly(t.kind, t.label, t.definition, t.needs) for t in study.tasks if t.name == first}
    tasks = [deadly.get(task.name, task) for task in study.tasks]

    def report(event):
        if event.what == "retried":
            died.append(event.task.name)
            assert len(died) < 5, "tried again and again"

    failed = executors.execute("local", tasks, place, report, workers=1, threads=1)
    assert died == [first] * 2
    (why,) = failed.values()
    assert re.search("worker died.*3 times", why)
    assert states(study, place) == {"done": 3, "not started": 1}
