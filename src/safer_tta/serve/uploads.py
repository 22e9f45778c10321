"""The images of a request: read from its body, and decoded on threads of their own."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from .._internal.hashing import hash_bytes
from .._internal.resizing import STRETCH, Resize
from .images import Pictures, from_array, from_files
from .limits import Limits, Refused

T = TypeVar("T")
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "properties": {"images": {"type": "array", "items": FILE}}, "required": ["images"]}
BODY = {"multipart/form-data": {"schema": FORM}, "application/x-npy": {"schema": FILE}}  # of a batch, for the API page


class Decoder:
    """Decodes images on two threads of its own, so that large uploads delay only their sender."""

    def __init__(self, side: int, limits: Limits, resize: Resize = STRETCH) -> None:
        self.side, self.limits, self.busy = side, limits, 0
        self.decode_files = functools.partial(from_files, resize=resize)
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="decoding")

    async def read(self, request: Request) -> tuple[Pictures, str]:
        """Return the images of a batch, and a hash of them."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/x-npy":
            return await self.decode(from_array, await request.body())
        if kind != "multipart/form-data":
            expected = "expected multipart/form-data with images, or application/x-npy"
            raise Refused(415, f"the type of the body is {kind or 'missing'}; {expected}")
        return await self.decode(self.decode_files, await _read_files(request, self.limits))

    async def decode(self, decode: Callable[[T, int, Limits], Pictures], content: T) -> tuple[Pictures, str]:
        if self.busy >= self.limits.decoding:
            raise Refused(429, "too many batches are being decoded; try again in 1 s", retry_after=1)

        def work() -> tuple[Pictures, str]:
            images = decode(content, self.side, self.limits)
            return images, hash_bytes([images.tobytes()]).hex()

        self.busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, work)
        finally:
            self.busy -= 1


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
            raise Refused(422, "a part named images is text; expected files, with a filename")
        return [await part.read() for part in parts if not isinstance(part, str)]
    finally:
        await form.close()
