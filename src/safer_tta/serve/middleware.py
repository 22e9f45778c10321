"""Access control before anything of a request is read, and security headers on every response."""

import asyncio
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .limits import Limits, RateLimit, Refused
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
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
SAME = {"same-origin", "none"}  # what browsers send with a page's own requests, and with a typed address


class AccessControl:
    """An application that checks the token, the origin, the rate and the size of every request first."""

    def __init__(self, app: ASGIApp, tokens: Tokens, limits: Limits) -> None:
        self.app, self.tokens, self.limits = app, tokens, limits
        self.rate = RateLimit(limits.requests_per_s)
        self.arriving = 0  # bytes of bodies that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            limit = self._admit(scope)
        except Refused as error:
            response = error_response(error.status, error.message, error.retry_after)
            await response(scope, receive, with_security_headers(send))
            return
        await self._pass_on(scope, receive, send, limit)

    def _admit(self, scope: Scope) -> int:
        """Refuse the request, or return how many bytes its body may have."""
        headers, path = Headers(scope=scope), str(scope["path"])
        if not path.startswith("/v1"):
            return self.limits.json_bytes
        self._check_site(headers)
        owner = self.tokens.owner(headers.get("authorization"))
        self.rate.take(owner)
        scope.setdefault("state", {})["owner"] = owner
        batch = scope["method"] == "POST" and path.endswith("/batches")
        limit = self.limits.body_bytes if batch else self.limits.json_bytes
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise Refused(413, f"the request has {length} bytes; expected at most {limit}. Send smaller batches")
        return limit

    def _check_site(self, headers: Headers) -> None:
        """Refuse pages of other sites that a browser here has open, even if their host name leads to this machine."""
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        origin = headers.get("origin")
        elsewhere = origin is not None and (urlsplit(origin).hostname or "") != host
        if elsewhere or headers.get("sec-fetch-site", "none") not in SAME:
            raise Refused(403, "the request comes from a page of another site; expected the service's own")
        if not self.tokens and host not in LOOPBACK:
            raise Refused(403, f"the host is {host}; without tokens the service answers only 127.0.0.1 and localhost")

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        """Count the body as it arrives, whatever its headers claim."""
        arrived, answered = 0, False

        async def send_noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        async def receive_counted() -> Message:
            nonlocal arrived
            message = await receive()
            size = len(message.get("body", b""))
            arrived += size
            self.arriving += size
            if arrived > limit:
                raise Refused(413, f"the request is longer than {limit} bytes; send smaller batches")
            if self.arriving > self.limits.upload_bytes:
                raise Refused(429, "too much is arriving at once; try again in 1 s", retry_after=1)
            return message

        try:
            await self.app(scope, receive_counted, with_security_headers(send_noted))
        except asyncio.CancelledError:  # the server stops, and has waited long enough for the rest of the body
            if answered:
                raise
            response = error_response(503, "the service is stopping; send the request again later", retry_after=5)
            await response(scope, receive, with_security_headers(send))
        finally:
            self.arriving -= arrived


def with_security_headers(send: Send) -> Send:
    """Return a `send` that adds the security headers to the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers


def error_response(status: int, message: str, retry_after: float | None = None) -> JSONResponse:
    """Return an error as the API gives it."""
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": message}, status, headers)
