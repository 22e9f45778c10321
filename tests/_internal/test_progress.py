"""Test what is shown of long work, and that a stream shows it only when asked."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from safer_tta._internal import progress as shown
from safer_tta._internal.progress import QUIET_SECONDS, counted, length, progress
from tests.conftest import adapt_small, batches
from tests.guards.parts import guarded


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def notebook(monkeypatch):
    """An error stream as a notebook has it: a class of ipykernel's, which is not a terminal."""
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(shown, "sys", SimpleNamespace(stderr=stream))
    return stream


def test_without_a_terminal_a_line_comes_every_15_seconds(clock, capsys):
    with progress("work") as tick:
        tick(1, 4, loss=0.5)
        clock.now = QUIET_SECONDS
        tick(2, 4, loss=0.25)
        tick(3, 4)
        clock.now *= 3
        tick(3, None)
    assert capsys.readouterr().err.splitlines() == ["work: 2/4, loss 0.25, about 15 s left", "work: 3, 45 s so far"]


def test_a_notebook_shows_one_line_that_changes(clock, notebook):
    with progress("work") as tick:
        for done in (1, 2):
            clock.now = float(done)
            tick(done, 2, accuracy=100 - 91 * (done - 1))
    first, second = notebook.getvalue().removeprefix("\r").removesuffix("\n").split("\r")
    assert first == "work: 1/2, accuracy 100, about 1 s left"
    assert second.rstrip() == "work: 2/2, accuracy 9, about 0 s left"
    assert len(second) == len(first)  # what was longer before is written over


def test_a_terminal_shows_a_bar(monkeypatch):
    stream = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("work") as tick:
        tick(3, 4)
    assert re.search(r"work.*3/4", stream.getvalue())


@pytest.mark.parametrize("make", [adapt_small, guarded])
def test_a_stream_shows_its_progress_when_asked(make, notebook):
    expected = [answer.probs for answer in make().stream(batches(3))]
    assert notebook.getvalue() == ""
    answers = [answer.probs for answer in make().stream(batches(3), progress=True)]
    assert all((a == b).all() for a, b in zip(answers, expected, strict=True))
    assert re.findall(r"tent: (\S+),", notebook.getvalue()) == ["1/3", "2/3", "3/3"]
    list(make().stream(iter(batches(3)), progress=True))
    assert re.findall(r"tent: (\d+), \d+ s so far", notebook.getvalue()) == ["1", "2", "3"]


def test_a_stream_that_is_shown_is_as_lazy_as_one_that_is_not(notebook):
    taken = []
    answers = adapt_small().stream((taken.append(x) or x for x in batches(3)), progress=True)
    assert not taken
    next(answers)
    assert len(taken) == 1


def test_items_are_passed_on_and_their_number_may_be_unknown(capsys):
    assert list(counted(iter("abc"), "letters", None)) == ["a", "b", "c"]
    assert [length(items) for items in ([1, 2], iter([1]), range(7))] == [2, None, 7]
