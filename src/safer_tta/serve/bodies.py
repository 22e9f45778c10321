"""The body of a request as it arrives: counted, whatever its headers claim, and ended if it comes too slowly."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from .limits import Limits, Refused
from .shares import Share


class Body:
    """Reads a body. What has arrived belongs to the owner's share of the memory."""

    def __init__(self, receive: Receive, most: int, share: Share, limits: Limits) -> None:
        self._receive, self.most, self.share, self.limits = receive, most, share, limits
        self.arrived, self.waited, self.complete = 0, 0.0, False

    async def receive(self) -> Message:
        """Return the next part, or what comes after the body."""
        if self.complete:
            return await self._receive()
        message = await self._next()
        size = len(message.get("body", b""))
        self.arrived += size
        if self.arrived > self.most:
            raise Refused(413, f"the request is longer than {self.most} bytes; send smaller batches")
        self.share.resize(self.share.size + size)
        self.complete = not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        """Wait for a part. Only this waiting counts, not the time in which the service is busy with something else."""
        clock = asyncio.get_running_loop().time
        allowed = self.limits.body_s + self.arrived / self.limits.body_rate
        started = clock()
        try:
            async with asyncio.timeout(max(0.0, allowed - self.waited)):
                message = await self._receive()
        except TimeoutError:
            found = f"{self.arrived} bytes of the body arrived in {allowed:.0f} s"
            rate = f"{self.limits.body_s:g} s and then at least {self.limits.body_rate} bytes/s"
            raise Refused(408, f"{found}; expected all of it within {rate}. Send smaller batches") from None
        self.waited += clock() - started
        return message


def most_bytes(scope: Scope, headers: Headers, limits: Limits) -> int:
    """Return how many bytes the body of a request may have; refuse one that says that it has more."""
    batch = scope["method"] == "POST" and str(scope["path"]).endswith("/batches")
    most = limits.body_bytes if batch else limits.json_bytes
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise Refused(413, f"the request has {length} bytes; expected at most {most}. Send smaller batches")
    return most
