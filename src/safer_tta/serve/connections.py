"""Connections that cannot be used up: each has its deadlines, and the one that has been idle longest makes room."""

import asyncio
import contextlib
import dataclasses
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .guesses import network
from .limits import Limits

SPARE = 1024  # files that a service needs besides: the journal on each thread, large uploads, the model
WORDS = b'{"error": "all connections are in use; try again in 5 s"}'
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(WORDS), WORDS)
)


class Connections:
    """The open connections of a service, and since when each of them has had no request to be answered."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open: set[Connection] = set()
        self._idle: dict[str, OrderedDict[Connection, None]] = {}  # by address, the longest idle first

    def add(self, connection: "Connection") -> bool:
        """Take a connection, and close an idle one if there are too many; return False if all of them are in use."""
        if len(self.open) >= self.limits.connections and not self._make_room():
            return False
        self.open.add(connection)
        self.rest(connection)
        return True

    def rest(self, connection: "Connection") -> None:
        """Note that a connection is idle from now on."""
        self._idle.setdefault(connection.address, OrderedDict())[connection] = None

    def work(self, connection: "Connection") -> None:
        """Note that a connection has a request to be answered, so that it is not closed to make room."""
        idle = self._idle.get(connection.address, OrderedDict())
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(connection.address, None)

    def remove(self, connection: "Connection") -> None:
        self.open.discard(connection)
        self.work(connection)

    def _make_room(self) -> bool:
        """Close the longest idle connection of the address that has most of them."""
        if not self._idle:
            return False
        most = max(self._idle, key=lambda address: len(self._idle[address]))
        connection = next(iter(self._idle[most]))
        self.remove(connection)
        connection.end()
        return True


class Connection(H11Protocol):
    """A connection with deadlines for the headers of a request, for the time between requests, and for taking answers.

    `bodies.Body` has the one for bodies.
    """

    def __init__(self, table: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table, self.address, self.begun = table, "", False
        self._deadline: asyncio.TimerHandle | None = None  # for the client to send headers
        self._stall: asyncio.TimerHandle | None = None  # for the client to take what was sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = network(self.client[0] if self.client else "")
        if self.table.add(self):
            self._wait(self.table.limits.headers_s)
        else:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.begun and not self._answering:
            self.begun = True
            self._wait(self.table.limits.headers_s)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._answering:
            self.table.work(self)
            _cancel(self._deadline)

    def on_response_complete(self) -> None:
        self.begun = False
        if self in self.table.open:
            self.table.rest(self)
            self._wait(self.table.limits.idle_s)
        super().on_response_complete()  # the next request may be here already

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        _cancel(self._deadline)
        _cancel(self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.table.limits.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stall)

    def end(self) -> None:
        """Close without waiting for the client."""
        with contextlib.suppress(h11.LocalProtocolError):
            self.conn.send(h11.ConnectionClosed())
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        _cancel(self._deadline)
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.flow.write_paused:  # the client still takes the last answer, for which it has another deadline
            self._wait(self.table.limits.idle_s)
        else:
            self.end()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def fit(limits: Limits) -> Limits:
    """Allow this process as many open files as its connections need, and return limits that fit what it may have.

    Half of the connections cannot be in use by requests, so that there is always an idle one to close.
    """
    connections = _room_for(limits.connections)
    return dataclasses.replace(limits, connections=connections, requests=min(limits.requests, connections // 2))


def _room_for(connections: int) -> int:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, unlimited = connections + SPARE, resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        soft = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == unlimited or soft >= needed else max(soft - SPARE, soft // 2)
