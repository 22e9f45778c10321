from types import SimpleNamespace

import pytest

from safer_tta.bench.tasks import Place, Task
from safer_tta.executors import Event, progress_view
from safer_tta.executors.progress_view import QUIET_SECONDS, ProgressView, format_seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_view, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def tasks():
    return [Task("run", name, {"run": name}, passes=n) for name, n in (("one", 1.0), ("two", 3.0), ("x", 4.0))]


def finish(view, task, place):
    place.results.write({"run": task.name, "accuracy": 50.0})
    view(Event("finished", task))


def test_the_time_left_follows_from_the_passes_that_are_done(tasks, clock, tmp_path):
    place = Place(tmp_path)
    finish(ProgressView(tasks[:1], place), tasks[0], place)
    with ProgressView(tasks, place) as view:  # of eight passes, one is done already
        assert view.summary() == "1 of 3 done, 0 running, 2 left, time left unknown"
        clock.now = 6.0
        view(Event("moved", tasks[2], done=1, total=4))
        assert view.summary() == "1 of 3 done, 1 running, 1 left, about 36 s left"
        finish(view, tasks[1], place)
        assert view.summary() == "2 of 3 done, 1 running, 0 left, about 4 s left"


def test_failures_are_printed_at_once_and_the_summary_now_and_then(tasks, clock, tmp_path, capsys):
    with ProgressView(tasks, Place(tmp_path)) as view:
        view(Event("started", tasks[0]))
        view(Event("retried", tasks[0], why="its worker died"))
        view(Event("failed", tasks[0], why="no space"))
        assert capsys.readouterr().err.splitlines() == ["again: one: its worker died", "failed: one: no space"]
        clock.now = QUIET_SECONDS
        view(Event("started", tasks[1]))
        view(Event("moved", tasks[1], done=1, total=2))
    assert capsys.readouterr().err == "0 of 3 done, 1 running, 1 left, 1 failed, about 2 min left\n"


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (120, "2 min"), (7200, "2.0 h")])
def test_a_duration_has_a_unit_that_suits_it(seconds, text):
    assert format_seconds(seconds) == text
