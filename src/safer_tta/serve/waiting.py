"""Waiting for decoding and for the engine on behalf of a client, who may be gone before it is its turn."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from .limits import Refused

T = TypeVar("T")


async def answered(future: Future[T], request: Request, seconds: float) -> T:
    """Return the result of a job. Take it back if its client is gone or its turn does not come, but not once it began.

    A job that has begun is finished, whoever waits for it: with a key, its answer is found again.
    """
    result, gone = asyncio.wrap_future(future), asyncio.ensure_future(_leave(request))
    either: set[asyncio.Future[Any]] = {result, gone}
    try:
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if result.done() or not future.cancel():
            return await result
    finally:
        gone.cancel()
        result.cancel()  # where this wait is cancelled itself; it does nothing to what is done or has begun
    if gone.done():
        raise ClientDisconnect
    waited = f"the batch waited {seconds:g} s for its turn and was not applied"
    raise Refused(503, f"{waited}; send it again later", retry_after=5, reason="waited")


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """Return the result of some work, which is cancelled if the client is gone before."""
    result, gone = asyncio.ensure_future(work), asyncio.ensure_future(_leave(request))
    either: set[asyncio.Future[Any]] = {result, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return await result
    finally:
        gone.cancel()
        result.cancel()
    await asyncio.wait([result])  # until it has given back what it held
    raise ClientDisconnect


async def _leave(request: Request) -> None:
    """Wait until the client is gone. The whole body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
