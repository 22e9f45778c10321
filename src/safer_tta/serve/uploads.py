"""The images of a request: read from its body, and decoded on threads of their own."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from .._internal.hashing import hash_bytes
from .._internal.resizing import STRETCH, Resize
from .images import Pictures, check_count, from_array, from_files
from .limits import Limits, Refused
from .record import part
from .shares import Share
from .turns import Turns, owner_of

T = TypeVar("T")
Content = bytes | list[bytes]  # an array, or image files
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "properties": {"images": {"type": "array", "items": FILE}}, "required": ["images"]}
BODY = {"multipart/form-data": {"schema": FORM}, "application/x-npy": {"schema": FILE}}  # of a batch, for the API page


class Step(NamedTuple):
    """One picture of a batch to decode, or another piece of work for a batch."""

    stream: str
    work: Callable[[], Any]
    future: Future[Any]


class Decoder:
    """Decodes images on two threads of its own, one picture at a time and in turns over owners."""

    def __init__(self, side: int, limits: Limits, resize: Resize = STRETCH) -> None:
        self.side, self.limits, self.resize = side, limits, resize
        self.busy: Counter[str] = Counter()  # batches of each owner that are decoded or wait for it
        self.turns: Turns[Step] = Turns()
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="decoding")

    async def decode(self, content: Content, stream: str, share: Share) -> tuple[Pictures, str]:
        """Return the images of a batch, and a hash of them. In the share, they take the place of the body."""
        owner = owner_of(stream)
        if self.busy[owner] >= self.limits.decoding:
            problem = f"{self.busy[owner]} batches of this owner are being decoded, as many as may"
            raise Refused(429, f"{problem}; try again in 1 s", retry_after=1, reason="decoding")
        self.busy[owner] += 1
        try:
            share.resize(share.size + self._needed(content))
            with part("decode"):
                images = await self._images(content, stream)
                share.resize(images.nbytes)
                return images, await self._in_turn(stream, lambda: hash_bytes([images.tobytes()]).hex())
        finally:
            self.busy -= Counter([owner])

    def _needed(self, content: Content) -> int:
        """Return how many bytes the images will take."""
        return len(content) if isinstance(content, bytes) else len(content) * 3 * self.side**2

    async def _images(self, content: Content, stream: str) -> Pictures:
        if isinstance(content, bytes):
            return await self._in_turn(stream, lambda: from_array(content, self.side, self.limits))
        check_count(len(content), self.limits)
        images = np.empty((len(content), 3, self.side, self.side), np.uint8)
        pictures = from_files(content, self.side, self.limits, self.resize)
        for place in range(len(content)):
            images[place] = await self._in_turn(stream, lambda: next(pictures))
        return images

    async def _in_turn(self, stream: str, work: Callable[[], T]) -> T:
        step: Step = Step(stream, work, Future())
        self.turns.put(step)
        self.threads.submit(self._next)  # which takes not this step, but the one whose turn it is
        return cast(T, await asyncio.wrap_future(step.future))

    def _next(self) -> None:
        step = self.turns.get()
        if step is None or not step.future.set_running_or_notify_cancel():  # the client is gone
            return
        try:
            step.future.set_result(step.work())
        except BaseException as error:
            step.future.set_exception(error)


async def read(request: Request, limits: Limits) -> Content:
    """Return the image files in the body of a batch, or its array."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-npy":
        return b"".join([part async for part in request.stream()])  # which, unlike `body`, keeps no copy
    if kind != "multipart/form-data":
        expected = "expected multipart/form-data with images, or application/x-npy"
        raise Refused(415, f"the type of the body is {kind or 'missing'}; {expected}")
    return await _read_files(request, limits)


async def _read_files(request: Request, limits: Limits) -> list[bytes]:
    at_most: dict[str, Any] = {"max_files": limits.images + 1, "max_fields": 8, "max_part_size": 2**16}
    try:
        form = await MultiPartParser(request.headers, request.stream(), **at_most).parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        expected = "expected parts named images, one for each file"
        raise Refused(422, f"the form cannot be read ({error}); {expected}") from None
    try:
        parts = form.getlist("images")
        if any(isinstance(part, str) for part in parts):
            raise Refused(422, "a part named images is text; expected a file: give every part a filename")
        return [await part.read() for part in parts if not isinstance(part, str)]
    finally:
        await form.close()
