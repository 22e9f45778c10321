"""Access control before anything of a request is read, and security headers on every response."""

import asyncio
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .admission import Admission
from .bodies import Body
from .limits import Limits, Refused
from .record import current
from .tokens import Tokens

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Why a request is refused, for the metrics, where the refusal does not say it.
REASONS = {401: "token", 403: "site", 408: "slow", 413: "size", 429: "busy", 503: "not ready", 507: "disk"}


class AccessControl:
    """An application that checks the token, the origin, the rate and the size of every request first."""

    def __init__(self, app: ASGIApp, tokens: Tokens, limits: Limits) -> None:
        self.app, self.admission = app, Admission(tokens, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            owner = await self.admission.owner(scope)
            with self.admission.enter(owner, scope, receive) as body:
                await self._pass_on(scope, body, send)
        except Refused as error:  # before the application was asked, which reports its own
            response = error_response(error.status, error.message, error.retry_after, error.reason)
            await response(scope, receive, with_security_headers(send))

    async def _pass_on(self, scope: Scope, body: Body, send: Send) -> None:
        answered = False

        async def send_noted(message: Message) -> None:
            nonlocal answered
            answered = body.complete = True  # whatever still arrives is not read, and has no deadline
            await send(message)

        try:
            await self.app(scope, body.receive, with_security_headers(send_noted))
        except asyncio.CancelledError:  # the server stops, and has waited long enough for the rest of the body
            if answered:
                raise
            problem = "the service is stopping; send the request again later"
            response = error_response(503, problem, retry_after=5, reason="stopping")
            await response(scope, body.receive, with_security_headers(send))


def with_security_headers(send: Send) -> Send:
    """Return a `send` that adds the security headers to the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers


def error_response(
    status: int,
    message: str,
    retry_after: float | None = None,
    reason: str | None = None,
    more: Mapping[str, object] | None = None,
) -> JSONResponse:
    """Return an error as the API gives it, with the id of the request, which the log has too."""
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
    if status == 408:
        headers["Connection"] = "close"  # the rest of the body is not waited for
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    record, content = current.get(), {"error": message, **(more or {})}
    if record is not None:
        record.reason = reason or REASONS.get(status, "")
        content["request_id"] = record.id
    return JSONResponse(content, status, headers)
