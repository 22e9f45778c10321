"""Show the progress of long work: a bar in a terminal; elsewhere, a line every 15 seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Tick = Callable[..., None]  # tick(done, total, loss=0.3, accuracy=91.2)
QUIET_SECONDS = 15.0


def silent(done: int, total: int, **figures: float) -> None:
    """Report nothing: the default of every `tick`."""


@contextlib.contextmanager
def progress(label: str) -> Iterator[Tick]:
    """Yield a function to call with (done, total, **figures)."""
    bar = _bar(label) if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(label)
    else:
        with bar as tick:
            yield tick


def _lines(label: str) -> Tick:
    started = printed = time.monotonic()

    def tick(done: int, total: int, **figures: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= QUIET_SECONDS:
            printed = now
            left = (now - started) * (total - done) / max(1, done)
            print(f"{label}: {done}/{total}{_figures(figures)}, about {left:.0f} s left", file=sys.stderr, flush=True)  # noqa: T201

    return tick


def _bar(label: str) -> contextlib.AbstractContextManager[Tick] | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None

    @contextlib.contextmanager
    def show() -> Iterator[Tick]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total, **figures: bar.update(
                task, completed=done, total=total, description=label + _figures(figures)
            )

    return show()


def _figures(figures: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3g}" for name, value in figures.items())
