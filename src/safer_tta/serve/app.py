"""The service's front: addresses, who may use them, what they take and what they answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from . import images as pictures
from .journal import KEPT, Json
from .limits import RateLimit, Refused
from .reference import reference
from .sessions import Engine
from .tokens import Tokens

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
KEY = re.compile(r"[\x21-\x7e]{1,128}")
QUIET = 15.0  # seconds after which a feed says that it is still there
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
DASHBOARD = dict.fromkeys(("dashboard.js", "charts.js", "words.js"), "text/javascript") | {"dashboard.css": "text/css"}
ERROR: dict[str, Any] = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": words, **ERROR}
    for code, words in {
        400: "not to be understood", 401: "no known token", 404: "not there", 409: "at odds with what is there",
        413: "too large", 415: "of another type", 422: "not what was expected", 429: "too much at once",
        503: "stopping", 507: "no room",
    }.items()
}  # fmt: skip


class New(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str | None = Field(default=None, pattern=NAME)


class Labels(BaseModel):
    model_config = ConfigDict(extra="forbid")
    labels: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=4096)


class Error(BaseModel):
    error: str


def create_app(engine: Engine, tokens: Tokens) -> FastAPI:
    """The application around an engine; it stops the engine when it ends."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.stop)

    app = FastAPI(
        title="safer-tta", version=__version__, docs_url=None, redoc_url=None, lifespan=life, responses=REFUSALS
    )
    app.state.engine = engine
    app.add_middleware(Careful, limit=engine.limits.body_bytes)
    _errors(app)
    _open_to_all(app, engine)
    owner = _owner(tokens, RateLimit(engine.limits.requests_per_s))
    _streams(app, engine, owner)
    _batches(app, engine, owner)
    return app


def _owner(tokens: Tokens, rate: RateLimit) -> Any:
    def owner(authorization: Annotated[str | None, Header(include_in_schema=False)] = None) -> str:
        found = tokens.owner(authorization)
        rate.take(found)
        return found

    return Depends(owner)


StreamName = Annotated[str, Path(pattern=NAME)]


def _open_to_all(app: FastAPI, engine: Engine) -> None:
    files = resources.files("safer_tta.serve") / "dashboard"

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        if not engine.running:
            raise Refused(503, "the service is stopping", retry_after=5)
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


def _streams(app: FastAPI, engine: Engine, owner: Any) -> None:
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

    @app.post("/v1/streams", status_code=201)
    async def create(new: Annotated[New | None, Body()] = None, who: str = owner) -> Json:
        name = new.name if new is not None and new.name is not None else f"stream-{secrets.token_hex(6)}"
        await asyncio.wrap_future(engine.create(who, name))
        return await one(who, name)

    @app.get("/v1/streams")
    async def listed(who: str = owner) -> dict[str, list[Json]]:
        return {"streams": await run_in_threadpool(shown, who)}

    @app.get("/v1/streams/{name}")
    async def stream(name: StreamName, who: str = owner) -> Json:
        return await one(who, name)

    @app.delete("/v1/streams/{name}", status_code=204)
    async def delete(name: StreamName, who: str = owner) -> Response:
        await one(who, name)
        await asyncio.wrap_future(engine.delete(f"{who}/{name}"))
        return Response(status_code=204)

    def changing(what: str) -> Callable[..., Any]:
        async def change(name: StreamName, who: str = owner) -> Json:
            await one(who, name)
            await asyncio.wrap_future(engine.change(f"{who}/{name}", what))
            return await one(who, name)

        return change

    for what in ("freeze", "unfreeze", "reset", "rollback"):
        app.post(f"/v1/streams/{{name}}/{what}", name=what, operation_id=what)(changing(what))

    @app.get("/v1/model")
    async def model(who: str = owner) -> Json:
        return {**asdict(engine.served), "state_bytes": engine.state_bytes, "limits": asdict(engine.limits)}

    @app.get("/v1/audit")
    async def audit(who: str = owner) -> dict[str, list[Json]]:
        return {"events": await run_in_threadpool(engine.journal.audit, who)}

    @app.get("/v1/streams/{name}/reports", response_class=StreamingResponse)
    async def reports(name: StreamName, request: Request, who: str = owner) -> StreamingResponse:
        await one(who, name)
        return StreamingResponse(_feed(engine, f"{who}/{name}", request), media_type="text/event-stream")

    app.state.one = one


def _batches(app: FastAPI, engine: Engine, owner: Any) -> None:
    one = app.state.one
    body = {"requestBody": {"required": True, "content": _BATCH}}

    @app.post("/v1/streams/{name}/batches", openapi_extra=body)
    async def batch(
        name: StreamName,
        request: Request,
        response: Response,
        idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
        who: str = owner,
    ) -> Json:
        if idempotency_key is not None and not KEY.fullmatch(idempotency_key):
            raise Refused(422, "the Idempotency-Key is not 1 to 128 printable characters without spaces")
        await one(who, name)
        images = await _images(request, engine)
        content = hashlib.blake2b(images.tobytes(), digest_size=16).hexdigest()
        answer, before = await asyncio.wrap_future(engine.batch(f"{who}/{name}", images, idempotency_key, content))
        if before:
            response.headers["Idempotent-Replay"] = "true"
        return answer

    @app.get("/v1/streams/{name}/batches")
    async def batches(
        name: StreamName, last: Annotated[int, Query(ge=1, le=KEPT)] = 100, who: str = owner
    ) -> dict[str, list[Json]]:
        await one(who, name)
        return {"reports": await run_in_threadpool(engine.journal.reports, f"{who}/{name}", last)}

    @app.put("/v1/streams/{name}/batches/{number}/labels")
    async def label(
        name: StreamName, number: Annotated[int, Path(ge=1, le=2**53)], given: Labels, who: str = owner
    ) -> Json:
        await one(who, name)
        if max(given.labels) >= len(engine.served.classes):
            raise Refused(422, f"label {max(given.labels)} is no class; expected 0 to {len(engine.served.classes) - 1}")
        found = await run_in_threadpool(engine.journal.label, f"{who}/{name}", number, given.labels)
        if found is None:
            raise Refused(404, f"batch {number} is not kept; expected one of the stream's last {KEPT}")
        if isinstance(found, str):
            raise Refused(422, f"{found}; expected one for each image")
        return found


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


async def _images(request: Request, engine: Engine) -> pictures.Pictures:
    """The images of a batch, decoded beside the event loop."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    side, limits = engine.served.side, engine.limits
    if kind == "application/x-npy":
        return await run_in_threadpool(pictures.from_array, await request.body(), side, limits)
    if kind != "multipart/form-data":
        raise Refused(
            415, f"the body is {kind or 'of no type'}; expected multipart/form-data with images, or application/x-npy"
        )
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
        files = [await part.read() for part in parts if not isinstance(part, str)]
    finally:
        await form.close()
    return await run_in_threadpool(pictures.from_files, files, side, limits)


async def _feed(engine: Engine, stream: str, request: Request) -> AsyncIterator[str]:
    """Server-sent events. A reader that does not keep up loses the oldest, not the service its memory."""
    loop, reports = asyncio.get_running_loop(), asyncio.Queue[Json](100)

    def put(report: Json) -> None:
        if reports.full():
            reports.get_nowait()
        reports.put_nowait(report)

    stop = engine.listen(stream, lambda report: loop.call_soon_threadsafe(put, report))
    try:
        yield ": listening\n\n"
        while engine.running and not await request.is_disconnected():
            try:
                report = await asyncio.wait_for(reports.get(), QUIET)
            except TimeoutError:
                yield ": still here\n\n"
            else:
                yield f"event: report\ndata: {json.dumps(report)}\n\n"
    finally:
        stop()


# --- errors, in words ---------------------------------------------------------------------------------------------


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _said(error.status, error.message, error.retry_after)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return _said(error.status_code, str(error.detail).lower())

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _said(422, "; ".join(map(_explained, error.errors()[:3])))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        return _said(500, "the service failed at this; its log says more. Nothing was changed")


def _explained(problem: Mapping[str, Any]) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "string_pattern_mismatch":
        return f"{where} is no name; expected 1 to 64 letters, digits, '.', '_' or '-', the first of them no '.'"
    return f"{where}: {problem['msg']}"


def _said(status: int, message: str, retry_after: float | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": message}, status, headers)


class Careful:
    """Headers on every answer, and no body longer than allowed: counted as it arrives, whatever it says of itself."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self.limit:
                raise Refused(413, f"the request is longer than {self.limit} bytes; send smaller batches")
            return message

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self.app(scope, counted, dressed)
