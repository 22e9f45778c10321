import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safer_tta.bench.experiment import Experiment
from safer_tta.bench.study import states
from safer_tta.bench.tasks import QUICK_COUNT, Place, Task, execute, left, read_tasks, write_tasks
from safer_tta.data import StoreError
from safer_tta.pooling import RULES
from tests.bench.helpers import command, quick, rows_of
from tests.processes import call, run_safer, running, safer


def test_a_file_without_tasks_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StoreError, match="is not a file of tasks"):
        read_tasks(tmp_path / "other.json")


def test_a_task_is_refused_on_other_data(small, tmp_path):
    study, _ = quick(small, tmp_path)
    others = Place(tmp_path / "other data")  # 1,400 images a domain
    with pytest.raises(StoreError, match="other data"):
        execute(study.tasks[0], others)
    assert not others.store.exists()


def test_a_task_is_refused_by_other_versions_of_its_parts(small, tmp_path, monkeypatch):
    study, place = quick(small, tmp_path)
    planned = next(task for task in study.tasks if task.definition.get("predictor") == "safer")
    raised = {**planned.definition, "versions": {"pool cc_drop": RULES["cc_drop"].version + 1}}
    with pytest.raises(StoreError, match="other versions"):
        execute(Task("run", "another", raised), place)
    assert Experiment.from_description(raised).name == planned.name
    assert not place.store.joinpath("runs").exists()


def test_what_only_completed_runs_need_is_not_made(small, undisturbed, store, tmp_path):
    study, place = quick(small, tmp_path)
    assert [task.name for task in left(study.tasks, place)] == [task.name for task in study.tasks]
    place.results.folder.mkdir()
    for name in set(study.runs):
        place.results.path(name).write_bytes((store / "runs" / f"{name}.jsonl").read_bytes())
    assert left(study.tasks, place) == []
    place.results.path(study.runs[0]).unlink()  # of a clean stream, which needs no surrogate
    assert [task.kind for task in left(study.tasks, place)] == ["source", "run"]


def test_tasks_travel_as_a_file_to_a_machine_that_has_only_torch_and_numpy(small, undisturbed, tmp_path):
    study, _ = quick(small, tmp_path)
    write_tasks(tmp_path / "tasks.json", study.tasks)
    program = """
import sys
sys.modules.update(pydantic=None, duckdb=None, fastapi=None, kornia=None)  # importing any of them fails
from pathlib import Path
from safer_tta import executors
from safer_tta.bench.tasks import QUICK_COUNT, Place, read_tasks
if __name__ == "__main__":
    tasks, place = read_tasks(Path("tasks.json")), Place(Path("there"), count=QUICK_COUNT)
    assert executors.execute("local", tasks, place, lambda event: None, workers=1, threads=1) == {}
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)
    there = Place(tmp_path / "there", count=QUICK_COUNT)
    assert states(study, there) == {"done": 4}
    assert rows_of(study, there) == undisturbed


def limited(words, output, errors):
    """Be the command on a disk that takes no file above 40 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run_safer(words, output, errors, None, {})


def test_a_full_disk_is_named_and_earlier_rows_stay(small, undisturbed, store, tmp_path):
    study, _ = quick(small, store)
    place = Place(tmp_path / "store", count=QUICK_COUNT)
    first = place.results.path(study.runs[0])
    first.parent.mkdir(parents=True)
    before = Path(shutil.copy(store / "runs" / first.name, first)).read_bytes()
    assert call(limited, command(small, place.store), tmp_path / "output", tmp_path / "errors") == 1
    assert "File too large" in (tmp_path / "errors").read_text()
    assert first.read_bytes() == before
    assert states(study, place)["done"] == 1
    assert not list(place.store.rglob("*.part"))


def files(folder, half_done):
    """What lies in a store, finished or half-done: temporary files, checkpoints, parts of an array."""
    found = {path for path in folder.rglob("*") if path.suffix and path.parent.name != "locks"}
    return {path for path in found if half_done == (path.suffix in (".part", ".progress") or path.stem[:5] == "part-")}


def by_the_command(words, log):
    """Workers of the command are in its process group."""
    os.setpgid(0, 0)
    run_safer(words, log, log, None, {})


def killed_on_sight(store, half_done, work, *arguments):
    """Whether a process group was killed as soon as it had left something of this kind, or else ended by itself."""
    before = files(store, half_done)
    with running(work, *arguments) as process:
        while process.is_alive():
            if files(store, half_done) - before:
                os.killpg(process.pid, signal.SIGKILL)
                return True
            time.sleep(0.001)
        assert process.exitcode == 0
    return False


def test_kills_change_nothing(small, undisturbed, tmp_path):
    """The command is killed with its workers while a file is written and when one is finished, in turn."""
    study, place = quick(small, tmp_path / "store")
    place.store.mkdir()
    by_command = (by_the_command, command(small, place.store), tmp_path / "log")
    found = []
    for half_done in 4 * (True, False):
        if not killed_on_sight(place.store, half_done, *by_command):
            break
        found.append((sum(task.done(place) for task in study.tasks), bool(files(place.store, half_done=True))))
    assert any(0 < done < len(study.tasks) for done, _ in found)
    assert any(half_done for _, half_done in found)
    ended = safer(*command(small, place.store, "--json"))
    assert json.loads(ended.stdout)["done"] == 4
    assert rows_of(study, place) == undisturbed
    assert len(list(place.results.folder.glob("*.jsonl"))) == 4


def test_two_processes_on_one_store_neither_lose_nor_double_a_row(small, undisturbed, tmp_path):
    study, place = quick(small, tmp_path / "store")
    work = (by_the_command, command(small, place.store), tmp_path / "log")
    with running(*work) as one, running(*work) as other:
        for process in (one, other):
            process.join()
            assert process.exitcode == 0
    assert rows_of(study, place) == undisturbed
    assert len(list(place.results.folder.glob("*.jsonl"))) == 4
