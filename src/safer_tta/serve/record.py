"""What is known of the request that is being answered: its id, who asks for what, and how long each part takes.

The record lies in a context variable, so log lines and error bodies find it. The engine's thread works for a request in
a copy of the request's context.
"""

import contextvars
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from . import tracing

ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # neither spaces nor quotes, so that an id is one word of a log line
T = TypeVar("T")
P = ParamSpec("P")


@dataclass
class Record:
    """One request."""

    id: str
    method: str
    route: str  # as the API page writes it, such as /v1/streams/{name}
    stream: str = ""
    owner: str = ""
    client: str = ""  # its address
    path: str = ""  # as it came; only of a route that does not exist
    status: int = 0
    reason: str = ""  # why it was refused
    received: int = 0  # bytes of the body
    sent: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by part: decode, queue, model, commit


current: contextvars.ContextVar[Record | None] = contextvars.ContextVar("request", default=None)


def choose_id(wanted: str | None) -> str:
    """Return the id that a client wants, if it is one, or a new one."""
    return wanted if wanted is not None and ID.fullmatch(wanted) else secrets.token_hex(8)


def note_stream(name: str) -> None:
    """Note the stream of the current request where its address does not say it."""
    record = current.get()
    if record is not None:
        record.stream = name


@contextmanager
def part(name: str) -> Iterator[None]:
    """Time a part of the current request, and make it a span of its trace."""
    started = time.perf_counter()
    try:
        with tracing.span(name):
            yield
    finally:
        _note(name, time.perf_counter() - started)


class Origin:
    """The request that asked for some work which waits for another thread."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._since, self._begun = time.perf_counter(), False

    def begin(self) -> None:
        """Note how long the work has waited, once."""
        if not self._begun:
            self._begun, waited = True, time.perf_counter() - self._since
            self.note("queue", waited)

    def run(self, work: Callable[[], T]) -> T:
        """Do the work as a part of that request."""
        self.begin()
        return self._context.run(work)

    def note(self, name: str, seconds: float) -> None:
        """Note a part of that request which has just ended."""
        self._context.run(_note, name, seconds)
        self._context.run(tracing.past_span, name, seconds)

    def log(self, write: Callable[P, None], *what: P.args, **more: P.kwargs) -> None:
        """Write to the log as a part of that request."""
        self._context.run(write, *what, **more)


@contextmanager
def part_of_all(name: str, origins: Sequence[Origin]) -> Iterator[Callable[[], float]]:
    """Time a part of several requests, which is done for all of them at once. Yield what tells the time afterwards."""
    started, ended = time.perf_counter(), list[float]()
    try:
        yield lambda: ended[0] - started
    finally:
        ended.append(time.perf_counter())
        for origin in origins:
            origin.note(name, ended[0] - started)


def _note(name: str, seconds: float) -> None:
    record = current.get()
    if record is not None:
        record.seconds[name] = record.seconds.get(name, 0.0) + seconds
