"""Show the progress of long work: a bar in a terminal, one changing line in a notebook, elsewhere a line every 15 s."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Tick = Callable[..., None]  # tick(done, total, loss=0.3, accuracy=91.2)
QUIET_SECONDS = 15.0


def silent(done: int, total: int, **figures: float) -> None:
    """Report nothing: the default of every `tick`."""


def progress(label: str) -> contextlib.AbstractContextManager[Tick]:
    """Return a context that gives a function to call with (done, total, **figures); an unknown total is None."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return _bar(label)
    return _one_line(label) if _in_notebook() else contextlib.nullcontext(_lines(label))


def counted(items: Iterator[T], label: str, total: int | None) -> Iterator[T]:
    """Pass items on and show how many have come so far; `total` of them are expected, if that is known."""
    with progress(label) as tick:
        for done, item in enumerate(items, start=1):
            tick(done, total)
            yield item


def length(items: object) -> int | None:
    """Return how many items there are, if that is known before they come."""
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:  # a generator, or a loader of an endless dataset
        return None


def _in_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel")


def _lines(label: str) -> Tick:
    started = printed = time.monotonic()

    def tick(done: int, total: int | None, **figures: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= QUIET_SECONDS:
            printed = now
            print(_describe(label, now - started, done, total, figures), file=sys.stderr, flush=True)  # noqa: T201

    return tick


@contextlib.contextmanager
def _one_line(label: str) -> Iterator[Tick]:
    """Write over the same line again and again, as a notebook shows it."""
    started, widest = time.monotonic(), 0

    def tick(done: int, total: int | None, **figures: float) -> None:
        nonlocal widest
        text = _describe(label, time.monotonic() - started, done, total, figures)
        widest = max(widest, len(text))
        print("\r" + text.ljust(widest), end="", file=sys.stderr, flush=True)  # noqa: T201

    yield tick
    print(file=sys.stderr)  # noqa: T201


def _describe(label: str, seconds: float, done: int, total: int | None, figures: Mapping[str, float]) -> str:
    if total is None:
        return f"{label}: {done}{_figures(figures)}, {seconds:.0f} s so far"
    left = seconds * (total - done) / max(1, done)
    return f"{label}: {done}/{total}{_figures(figures)}, about {left:.0f} s left"


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Tick]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, **figures: bar.update(
            task, completed=done, total=total, description=label + _figures(figures)
        )


def _figures(figures: Mapping[str, float]) -> str:
    return "".join(f", {name} {value:.3g}" for name, value in figures.items())
