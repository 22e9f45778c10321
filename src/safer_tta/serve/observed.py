"""Around everything else: every request gets an id, a line in the log, its place in the metrics and a span."""

import ipaddress
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import logs, tracing
from .metrics import Metrics
from .middleware import error_response, with_security_headers
from .record import Record, choose_id, current

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNKNOWN = "unknown"  # the route of all paths that do not exist, and the method of all that are not HTTP's


class Observed:
    """An application whose requests can be followed; no exception leaves it."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], metrics: Metrics, stream_name: re.Pattern[str]
    ) -> None:
        self.app, self.routes, self.metrics, self.stream_name = app, routes, metrics, stream_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = self._record(scope, headers)
        started, before = time.perf_counter(), current.set(record)
        asked = {"http.request.method": record.method, "http.route": record.route, "safer.request_id": record.id}
        try:
            with (
                self.metrics.in_flight.track_inprogress(),
                tracing.request_span(f"{record.method} {record.route}", headers, asked) as finish,
            ):
                try:
                    await self._answer(record, scope, receive, send)
                finally:
                    record.owner = str(scope.get("state", {}).get("owner", ""))
                    finish(status=record.status, **{"safer.owner": record.owner, "safer.stream": record.stream})
                    seconds = time.perf_counter() - started
                    self.metrics.count_request(record, seconds)
                    logs.log_access(record, seconds)
        finally:
            current.reset(before)

    def _record(self, scope: Scope, headers: Mapping[str, str]) -> Record:
        route, parameters = self._match(scope)
        name = str(parameters.get("name", ""))
        method = scope["method"] if scope["method"] in METHODS else UNKNOWN
        return Record(
            id=choose_id(headers.get("x-request-id")), method=method, route=route, client=_address(scope),
            stream=name if route.startswith("/v1/streams/") and self.stream_name.match(name) else "",
            path=str(scope["path"])[: logs.LONGEST_PATH] if route == UNKNOWN else "",
        )  # fmt: skip

    def _match(self, scope: Scope) -> tuple[str, Mapping[str, Any]]:
        """Return the template of the request's route and the values in its path."""
        for route in self.routes:
            match, found = route.matches(scope)
            if match is not Match.NONE:  # or only the method is another
                return str(getattr(route, "path", UNKNOWN)), found.get("path_params", {})
        return UNKNOWN, {}

    async def _answer(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_counted() -> Message:
            message = await receive()
            record.received += len(message.get("body", b""))
            return message

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            record.sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive_counted, send_noted)
        except Exception as error:
            logs.log_failure("a request failed", error)
            if record.status == 0:
                response = error_response(500, "the service failed at this request; its log says why")
                await response(scope, receive, with_security_headers(send_noted))


def _address(scope: Scope) -> str:
    """Return the client's address. A proxy may have put there whatever it got, so nothing else is let through."""
    try:
        return str(ipaddress.ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return ""
