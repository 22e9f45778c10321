"""Show what is done, running and left while a plan is carried out, and how long the rest will take."""

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

from .._internal.progress import QUIET_SECONDS
from ..bench.tasks import Place, Task, left
from . import Event


class ProgressView:
    """A live display in a terminal; elsewhere, a line every 15 seconds. It is called with every event."""

    def __init__(self, tasks: Sequence[Task], place: Place) -> None:
        self.place = place
        self.open = left(tasks, place)
        self.total, self.already = len(tasks), len(tasks) - len(self.open)
        self.passes = sum(task.passes for task in self.open) or 1.0
        self.finished = self.failed = 0
        self.passed = 0.0
        self.running: dict[str, tuple[Task, int, int]] = {}
        self.latest: deque[str] = deque(maxlen=5)
        self.started = self.printed = time.monotonic()
        self.screen: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.screen = Live(console=Console(stderr=True), transient=True, refresh_per_second=4)
            self.screen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.screen is not None:
            self.screen.__exit__(*error)

    def __call__(self, event: Event) -> None:
        task = event.task
        if event.what in ("started", "moved"):
            self.running[task.name] = (task, event.done, event.total)
        elif event.what == "retried":
            self._print(f"again: {task.label}: {event.why}")
        else:
            self.running.pop(task.name, None)
            self.passed += task.passes
            self._end(event)
        self._show()

    def _end(self, event: Event) -> None:
        if event.what == "failed":
            self.failed += 1
            self._print(f"failed: {event.task.label}: {event.why}")
            return
        self.finished += 1
        if event.task.kind == "run":
            row = self.place.results.row(event.task.name)
            self.latest.append(f"{row['accuracy']:6.1f} %  {event.task.label}")

    def summary(self) -> str:
        """Return the state of the work in one line."""
        left = self.total - self.already - self.finished - self.failed - len(self.running)
        done = f"{self.already + self.finished} of {self.total} done"
        text = f"{done}, {len(self.running)} running, {max(0, left)} left"
        return text + (f", {self.failed} failed" if self.failed else "") + f", {self._time_left()}"

    def _time_left(self) -> str:
        """Estimate by the share of the passes that are done, since tasks differ far too much to count them."""
        moving = sum(task.passes * done / total for task, done, total in self.running.values() if total)
        share = (self.passed + moving) / self.passes
        if share < 0.01:
            return "time left unknown"
        seconds = (time.monotonic() - self.started) * max(0.0, 1 / share - 1)
        return f"about {format_seconds(seconds)} left"

    def _show(self) -> None:
        if self.screen is not None:
            running = (
                f"  {t.label}" + (f": {done}/{total}" if total else "") for t, done, total in self.running.values()
            )
            self.screen.update("\n".join([self.summary(), *running, *self.latest]))
        elif time.monotonic() - self.printed >= QUIET_SECONDS:
            self.printed = time.monotonic()
            self._print(self.summary())

    def _print(self, line: str) -> None:
        if self.screen is not None:
            self.screen.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def format_seconds(seconds: float) -> str:
    """Return a duration in a unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
