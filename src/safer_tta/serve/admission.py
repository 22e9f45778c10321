"""Who may come in, and how much of the service a request may hold while it is answered."""

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from .._internal.malloc import give_back_memory
from .bodies import Body, most_bytes
from .guesses import Guesses
from .limits import MEGABYTE, Limits, RateLimit, Refused
from .shares import Share, Shares
from .sites import check_host, check_site
from .tokens import Tokens

PROBES = {"/livez", "/healthz", "/readyz"}  # answered whatever else goes on
METRICS = "/metrics"  # shows more to one owner
BURST = 64 * MEGABYTE  # of requests, after which freed memory is given back to the system
ANYBODY, UNKNOWN = "", "?"  # no owner has such a name


class Admission:
    """Checks a request before its body is read, and gives its owner shares of what is scarce."""

    def __init__(self, tokens: Tokens, limits: Limits) -> None:
        self.tokens, self.limits = tokens, limits
        self.rate, self.guesses = RateLimit(limits.requests_per_s), Guesses()
        self.requests = Shares(limits.requests, "too many requests are being answered", "requests")
        self.memory = Shares(limits.upload_bytes, "too much is arriving or waiting at once", "uploads")

    async def owner(self, scope: Scope) -> str:
        """Return the owner of a request to the API, and ANYBODY for addresses that need no token; or refuse."""
        headers = Headers(scope=scope)
        if str(scope["path"]).startswith("/v1"):
            check_site(headers, tokens=bool(self.tokens))
        else:
            check_host(headers, tokens=bool(self.tokens))
            if scope["path"] != METRICS or "authorization" not in headers:
                return ANYBODY
        owner = await self._owner_of(headers.get("authorization"), (scope.get("client") or ("",))[0])
        scope.setdefault("state", {})["owner"] = owner  # also of a request that is refused now
        self.rate.take(owner)
        return owner

    async def _owner_of(self, header: str | None, address: str) -> str:
        with Share(self.requests, UNKNOWN) as place:
            await self.guesses.wait(address, header or "", place)
        try:
            owner = self.tokens.owner(header)
        except Refused:
            if header is not None:  # else it is no attempt, but a client without a token
                self.guesses.wrong(address)
            raise
        self.guesses.right(address, header or "")
        return owner

    @contextlib.contextmanager
    def enter(self, owner: str, scope: Scope, receive: Receive) -> Iterator[Body]:
        """Count a request and its body in the shares of its owner for as long as it is answered."""
        most = most_bytes(scope, Headers(scope=scope), self.limits)
        with Share(self.requests, owner) as place, Share(self.memory, owner) as share:
            if scope["path"] not in PROBES:
                place.resize(1)
            scope.setdefault("state", {})["share"] = share
            yield Body(receive, most, share, self.limits)
        if self.memory.peak > BURST and not self.memory.held:
            self.memory.peak = 0
            asyncio.get_running_loop().run_in_executor(None, give_back_memory)
