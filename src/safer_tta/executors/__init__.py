"""Executors carry out the tasks of a plan: in processes of this machine, or on a Ray cluster, with the same rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .._internal.checks import one_of
from ..bench.tasks import Place, Task, left

EXECUTORS = ("local", "ray")
ATTEMPTS = 3  # since a worker may die through no fault of the task


@dataclass(frozen=True)
class Event:
    what: str  # started, moved (done of total), finished, failed (why) or retried (why)
    task: Task
    done: int = 0
    total: int = 0
    why: str = ""


Report = Callable[[Event], None]


class Schedule:
    """Tells which tasks may start: those whose needs are done. A task fails if one of its needs failed."""

    def __init__(self, tasks: Sequence[Task], place: Place, report: Report) -> None:
        self.report, self.failed = report, dict[str, str]()
        self.known = {task.name: task for task in tasks}
        self.waiting = left(tasks, place)
        self.left = {task.name for task in self.waiting}

    def next(self) -> Task | None:
        """Return a task that may start now, if there is one."""
        for task in list(self.waiting):
            broken = [need for need in task.needs if need in self.failed]
            if broken:
                self.waiting.remove(task)
                self.end(task, f"it needs {self.known[broken[0]].label}, which failed")
            elif not any(need in self.left for need in task.needs):
                self.waiting.remove(task)
                return task
        return None

    def end(self, task: Task, why: str | None = None) -> None:
        """Take a task as finished, or as failed if there is a reason."""
        self.left.discard(task.name)
        if why is not None:
            self.failed[task.name] = why
        self.report(Event("finished" if why is None else "failed", task, why=why or ""))


def execute(executor: str, tasks: Sequence[Task], place: Place, report: Report, **options: Any) -> dict[str, str]:
    """Execute tasks on "local" or "ray"; return {label: reason} of those that failed."""
    one_of(EXECUTORS, executor=executor)
    if executor == "local":
        from .local import carry_out
    else:
        from .ray import carry_out
    schedule = Schedule(tasks, place, report)
    carry_out(schedule, place, **options)
    return {schedule.known[name].label: why for name, why in schedule.failed.items()}
