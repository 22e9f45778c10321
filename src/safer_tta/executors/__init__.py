"""Where tasks are carried out: processes of this machine, or a Ray cluster. Same tasks, same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.tasks import Place, Task, left
from ..errors import InvalidValueError

ATTEMPTS = 3  # a worker may die of something that is not the task's fault


@dataclass(frozen=True)
class Event:
    """What happened to a task: started, moved (done of total), finished, failed (why), retried (why)."""

    what: str
    task: Task
    done: int = 0
    total: int = 0
    why: str = ""


Report = Callable[[Event], None]


class Schedule:
    """Which tasks may start: those whose needs are done. A task whose needs failed fails with them."""

    def __init__(self, tasks: Sequence[Task], place: Place, report: Report) -> None:
        self.report, self.failed = report, dict[str, str]()
        self.known = {task.name: task for task in tasks}
        self.waiting = left(tasks, place)
        self.left = {task.name for task in self.waiting}

    def next(self) -> Task | None:
        """A task that may start now."""
        for task in list(self.waiting):
            broken = [need for need in task.needs if need in self.failed]
            if broken:
                self.waiting.remove(task)
                self.fail(task, f"it needs {self.known[broken[0]].label}, which failed")
            elif not any(need in self.left for need in task.needs):
                self.waiting.remove(task)
                return task
        return None

    def finish(self, task: Task) -> None:
        self.left.discard(task.name)
        self.report(Event("finished", task))

    def fail(self, task: Task, why: str) -> None:
        self.left.discard(task.name)
        self.failed[task.name] = why
        self.report(Event("failed", task, why=why))


def execute(engine: str, tasks: Sequence[Task], place: Place, report: Report, **options: Any) -> dict[str, str]:
    """Carry tasks out on an engine, "local" or "ray"; {label: why} of those that failed."""
    if engine == "local":
        from .local import carry_out
    elif engine == "ray":
        from .ray import carry_out
    else:
        raise InvalidValueError(f"engine {engine!r} is unknown; expected local or ray")
    schedule = Schedule(tasks, place, report)
    carry_out(schedule, place, **options)
    return {schedule.known[name].label: why for name, why in schedule.failed.items()}
