"""The service's front: addresses, who may use them, what they take and what they answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any, TypeVar

from fastapi import Body, Depends, FastAPI, Header, Path, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from .. import __version__
from . import images as pictures
from . import shapes
from .careful import Careful, said
from .journal import KEPT, Json
from .limits import Limits, Refused
from .reference import reference
from .sessions import Engine
from .tokens import Tokens

T = TypeVar("T")
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
KEY = re.compile(r"[\x21-\x7e]{1,128}")
QUIET = 15.0  # seconds after which a feed says that it is still there
DASHBOARD = dict.fromkeys(("dashboard.js", "charts.js", "words.js"), "text/javascript") | {"dashboard.css": "text/css"}


class New(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str | None = Field(default=None, pattern=NAME)


class Labels(BaseModel):
    model_config = ConfigDict(extra="forbid")
    labels: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=4096)


REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": words, "model": shapes.Error}
    for code, words in {
        400: "not to be understood", 401: "no known token", 403: "from another site", 404: "not there",
        409: "at odds with what is there", 413: "too large", 415: "of another type", 422: "not what was expected",
        429: "too much at once", 503: "stopping", 507: "no room",
    }.items()
}  # fmt: skip


def _as(shape: type[BaseModel], status: int = 200) -> dict[str, Any]:
    """An address that answers in a shape, which is written on the API page and not checked with every answer."""
    described: dict[int | str, dict[str, Any]] = {status: {"model": shape, "description": shape.__name__.lower()}}
    return {"status_code": status, "response_class": JSONResponse, "response_model": None, "responses": described}


def create_app(engine: Engine, tokens: Tokens) -> Careful:
    """The application around an engine; it stops the engine when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.stop)

    app = FastAPI(
        title="safer-tta", version=__version__, docs_url=None, redoc_url=None, lifespan=life, responses=REFUSALS,
        redirect_slashes=False,
    )  # fmt: skip
    _errors(app)
    _open_to_all(app, engine)
    _streams(app, engine)
    _batches(app, engine)
    return Careful(app, tokens, engine.limits)


async def _owner(request: Request, _: Annotated[Any, Security(HTTPBearer(auto_error=False))]) -> str:
    """As the way in has found out, before anything of the request was read."""
    return str(request.state.owner)


owner = Depends(_owner)


StreamName = Annotated[str, Path(pattern=NAME)]


def _open_to_all(app: FastAPI, engine: Engine) -> None:
    files = resources.files("safer_tta.serve") / "dashboard"

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        if not engine.ready:
            raise Refused(503, "the service takes no batches", retry_after=5)
        return {"status": "ok"}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse((files / "index.html").read_text(encoding="utf-8"))

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in DASHBOARD:  # a list, not a path: nothing else can be asked for
            raise Refused(404, "there is no such file")
        return Response((files / name).read_text(encoding="utf-8"), media_type=DASHBOARD[name])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference(app.openapi()))


def _streams(app: FastAPI, engine: Engine) -> None:
    def shown(who: str, name: str | None = None) -> list[Json]:
        found = engine.journal.described(who, name)
        for stream in found:
            stream["state"] = "hot" if engine.hot(f"{who}/{stream['name']}") else "parked"
        return found

    async def one(who: str, name: str) -> Json:
        found = await run_in_threadpool(shown, who, name)
        if not found:
            raise Refused(404, f"there is no stream {name!r}; POST /v1/streams creates one")
        return found[0]

    @app.post("/v1/streams", **_as(shapes.Stream, 201))
    async def create(new: Annotated[New | None, Body()] = None, who: str = owner) -> Response:
        name = new.name if new is not None and new.name is not None else f"stream-{secrets.token_hex(6)}"
        await asyncio.wrap_future(engine.create(who, name))
        return JSONResponse(await one(who, name), 201)

    @app.get("/v1/streams", **_as(shapes.Streams))
    async def listed(who: str = owner) -> Response:
        return JSONResponse({"streams": await run_in_threadpool(shown, who)})

    @app.get("/v1/streams/{name}", **_as(shapes.Stream))
    async def stream(name: StreamName, who: str = owner) -> Response:
        return JSONResponse(await one(who, name))

    @app.delete("/v1/streams/{name}", status_code=204)
    async def delete(name: StreamName, who: str = owner) -> Response:
        await one(who, name)
        await asyncio.wrap_future(engine.delete(f"{who}/{name}"))
        return Response(status_code=204)

    def changing(what: str) -> Callable[..., Any]:
        async def change(name: StreamName, who: str = owner) -> Response:
            await one(who, name)
            await asyncio.wrap_future(engine.change(f"{who}/{name}", what))
            return JSONResponse(await one(who, name))

        return change

    for what in ("freeze", "unfreeze", "reset", "rollback"):
        app.post(f"/v1/streams/{{name}}/{what}", name=what, operation_id=what, **_as(shapes.Stream))(changing(what))

    @app.get("/v1/model", **_as(shapes.Model))
    async def model(who: str = owner) -> Response:
        told = {**asdict(engine.served), "state_bytes": engine.state_bytes, "limits": asdict(engine.limits)}
        return JSONResponse(told)

    @app.get("/v1/audit", **_as(shapes.Audit))
    async def audit(who: str = owner) -> Response:
        return JSONResponse({"events": await run_in_threadpool(engine.journal.audit, who)})

    @app.get("/v1/streams/{name}/reports", response_class=StreamingResponse)
    async def reports(name: StreamName, request: Request, who: str = owner) -> StreamingResponse:
        await one(who, name)
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[Json | None](100)
        stop = engine.listen(f"{who}/{name}", lambda report: loop.call_soon_threadsafe(_put, heard, report))
        return StreamingResponse(_feed(heard, stop, request), media_type="text/event-stream")


def _batches(app: FastAPI, engine: Engine) -> None:
    decoding = Decoding(engine.served.side, engine.limits)

    async def there(who: str, name: str) -> None:
        if not await run_in_threadpool(engine.journal.exists, f"{who}/{name}"):
            raise Refused(404, f"there is no stream {name!r}; POST /v1/streams creates one")

    body = {"requestBody": {"required": True, "content": _BATCH}}

    @app.post("/v1/streams/{name}/batches", openapi_extra=body, **_as(shapes.Answer))
    async def batch(
        name: StreamName,
        request: Request,
        idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
        who: str = owner,
    ) -> Response:
        if idempotency_key is not None and not KEY.fullmatch(idempotency_key):
            raise Refused(422, "the Idempotency-Key is not 1 to 128 printable characters without spaces")
        await there(who, name)
        engine.check_room(f"{who}/{name}")
        images, content = await _images(request, decoding)
        answer, before = await asyncio.wrap_future(engine.batch(f"{who}/{name}", images, idempotency_key, content))
        return JSONResponse(answer, headers={"Idempotent-Replay": "true"} if before else None)

    @app.get("/v1/streams/{name}/batches", **_as(shapes.Reports))
    async def batches(name: StreamName, last: Annotated[int, Query(ge=1, le=KEPT)] = 100, who: str = owner) -> Response:
        await there(who, name)
        return JSONResponse({"reports": await run_in_threadpool(engine.journal.reports, f"{who}/{name}", last)})

    @app.put("/v1/streams/{name}/batches/{number}/labels", **_as(shapes.Report))
    async def label(
        name: StreamName, number: Annotated[int, Path(ge=1, le=2**53)], given: Labels, who: str = owner
    ) -> Response:
        await there(who, name)
        if max(given.labels) >= len(engine.served.classes):
            raise Refused(422, f"label {max(given.labels)} is no class; expected 0 to {len(engine.served.classes) - 1}")
        found = await run_in_threadpool(engine.journal.label, f"{who}/{name}", number, given.labels)
        if found is None:
            raise Refused(404, f"batch {number} is not kept; expected one of the stream's last {KEPT}")
        if isinstance(found, str):
            raise Refused(422, f"{found}; expected one for each image")
        return JSONResponse(found)


_BATCH = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            "required": ["images"],
        }
    },
    "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
}


class Decoding:
    """Images are decoded on two threads of their own: who sends large ones waits for himself, not everybody."""

    def __init__(self, side: int, limits: Limits) -> None:
        self.side, self.limits, self.busy = side, limits, 0
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="decoding")

    async def __call__(
        self, decode: Callable[[T, int, Limits], pictures.Pictures], content: T
    ) -> tuple[pictures.Pictures, str]:
        """(images, a hash of them)."""
        if self.busy >= self.limits.decoding:
            raise Refused(429, "too many batches are being decoded; try again in 1 s", retry_after=1)
        self.busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, self._decoded, decode, content)
        finally:
            self.busy -= 1

    def _decoded(
        self, decode: Callable[[T, int, Limits], pictures.Pictures], content: T
    ) -> tuple[pictures.Pictures, str]:
        images = decode(content, self.side, self.limits)
        return images, hashlib.blake2b(images.tobytes(), digest_size=16).hexdigest()


async def _images(request: Request, decoding: Decoding) -> tuple[pictures.Pictures, str]:
    """The images of a batch, and a hash of them."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/x-npy":
        return await decoding(pictures.from_array, await request.body())
    if kind != "multipart/form-data":
        raise Refused(
            415, f"the body is {kind or 'of no type'}; expected multipart/form-data with images, or application/x-npy"
        )
    return await decoding(pictures.from_files, await _files(request, decoding.limits))


async def _files(request: Request, limits: Limits) -> list[bytes]:
    try:
        parser = MultiPartParser(
            request.headers, request.stream(), max_files=limits.images + 1, max_fields=8, max_part_size=2**16
        )
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        raise Refused(
            422, f"the form cannot be read ({error}); expected parts named images, one for each file"
        ) from None
    try:
        parts = form.getlist("images")
        if any(isinstance(part, str) for part in parts):
            raise Refused(422, "a part named images is text; expected files, with a filename")
        return [await part.read() for part in parts if not isinstance(part, str)]
    finally:
        await form.close()


def _put(heard: asyncio.Queue[Json | None], report: Json | None) -> None:
    """A reader that does not keep up loses the oldest, not the service its memory."""
    if heard.full():
        heard.get_nowait()
    heard.put_nowait(report)


async def _feed(heard: asyncio.Queue[Json | None], stop: Callable[[], None], request: Request) -> AsyncIterator[str]:
    """Server-sent events, until there are no more or nobody reads them."""
    try:
        yield ": listening\n\n"
        while not await request.is_disconnected():
            try:
                report = await asyncio.wait_for(heard.get(), QUIET)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if report is None:
                return
            yield f"event: report\ndata: {json.dumps(report)}\n\n"
    finally:
        stop()


# --- errors, in words ---------------------------------------------------------------------------------------------


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return said(error.status, error.message, error.retry_after)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return said(error.status_code, str(error.detail).lower())

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return said(422, "; ".join(map(_explained, error.errors()[:3])))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody will read it

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return said(500, "the service failed at this; its log says more")


def _explained(problem: Mapping[str, Any]) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "string_pattern_mismatch":
        return f"{where} is no name; expected 1 to 64 letters, digits, '.', '_' or '-', the first of them no '.'"
    return f"{where}: {problem['msg']}"
