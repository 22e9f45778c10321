"""Show the progress of long work: a bar in a terminal; elsewhere, a line every 15 seconds."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator

Tick = Callable[..., None]  # tick(done, total, loss=0.3, accuracy=91.2)
QUIET_SECONDS = 15.0


def silent(done: int, total: int, **figures: float) -> None:
    """Report nothing: the default of every `tick`."""


def progress(label: str) -> contextlib.AbstractContextManager[Tick]:
    """Return a context that gives a function to call with (done, total, **figures)."""
    drawable = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return _bar(label) if drawable else contextlib.nullcontext(_lines(label))


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


def _figures(figures: dict[str, float]) -> str:
    return "".join(f", {name} {value:.3g}" for name, value in figures.items())
