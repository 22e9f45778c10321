"""The addresses of the service: who may use them, what they take and what they answer."""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header, Path, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from .. import __version__
from .._internal.resizing import Resize
from . import schemas
from .api_page import add_api_page
from .engine import Engine
from .explaining import explain_errors
from .journal import KEPT, Json
from .limits import Refused
from .middleware import AccessControl
from .observed import Observed
from .operations import describe_operations
from .probes import add_probes
from .quota import Quota
from .record import note_stream
from .rollouts import add_rollout
from .routes import owner, returns
from .tokens import Tokens
from .uploads import BODY, Decoder, read
from .waiting import answered, unless_gone

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
KEY = re.compile(r"[\x21-\x7e]{1,128}")
QUIET = 15.0  # seconds after which a silent feed sends a comment
FEED = 100  # reports that wait for a slow reader
SCRIPTS = ("dashboard.js", "charts.js", "suspicion.js", "drawing.js", "words.js")
DASHBOARD = dict.fromkeys(SCRIPTS, "text/javascript") | {"dashboard.css": "text/css"}
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": words, "model": schemas.Error}
    for code, words in {
        400: "malformed", 401: "unknown token", 403: "from another site", 404: "not found", 408: "too slow",
        409: "conflict", 413: "too large", 415: "unsupported type", 422: "invalid", 429: "too much at once",
        503: "stopping", 507: "no room",
    }.items()
}  # fmt: skip


class New(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str | None = Field(default=None, pattern=NAME)


class Labels(BaseModel):
    model_config = ConfigDict(extra="forbid")
    labels: list[Annotated[int, Field(ge=0, strict=True)]] = Field(min_length=1, max_length=4096)


def create_app(engine: Engine, tokens: Tokens) -> Observed:
    """Return the application around an engine; it stops the engine when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.stop)

    app = FastAPI(
        title="safer-tta", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, responses=REFUSALS,
        redirect_slashes=False, generate_unique_id_function=lambda route: route.name,
    )  # fmt: skip
    explain_errors(app)
    for add in (_add_dashboard, _add_streams, _add_changes, _add_batches, _add_labels):
        add(app, engine)
    _add_service(app, engine, tokens)
    add_rollout(app, engine, tokens)
    add_probes(app, engine, tokens)
    add_api_page(app)
    describe_operations(app)
    return Observed(AccessControl(app, tokens, engine.limits), app.routes, engine.metrics, re.compile(NAME))


StreamName = Annotated[str, Path(pattern=NAME)]
BatchNumber = Annotated[int, Path(ge=1, le=2**53)]
IdempotencyKey = Annotated[str | None, Header(max_length=128)]
Last = Annotated[int, Query(ge=1, le=KEPT)]


def _add_dashboard(app: FastAPI, _: Engine) -> None:
    files = resources.files("safer_tta.serve") / "dashboard"

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return HTMLResponse((files / "index.html").read_text(encoding="utf-8"))

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def dashboard_file(name: str) -> Response:
        if name not in DASHBOARD:  # a list, not a path: no other file can be asked for
            raise Refused(404, "there is no such file; the dashboard is at /")
        return Response((files / name).read_text(encoding="utf-8"), media_type=DASHBOARD[name])


async def _find(engine: Engine, who: str, name: str) -> Json:
    """Return a stream as the API shows it."""
    found = await run_in_threadpool(engine.describe, who, name)
    if not found:
        raise _refuse_unknown(name)
    return found[0]


async def _check_exists(engine: Engine, who: str, name: str) -> None:
    if not await run_in_threadpool(engine.journal.exists, f"{who}/{name}"):
        raise _refuse_unknown(name)


def _refuse_unknown(name: str) -> Refused:
    return Refused(404, f"there is no stream {name!r}; POST /v1/streams creates one")


def _add_streams(app: FastAPI, engine: Engine) -> None:
    quota = Quota(engine.journal, engine.limits)

    @app.post("/v1/streams", **returns(schemas.Stream, 201))
    async def create_stream(new: Annotated[New | None, Body()] = None, who: str = owner) -> Response:
        name = new.name if new is not None and new.name is not None else f"stream-{secrets.token_hex(6)}"
        note_stream(name)
        await quota.check(who)
        await asyncio.wrap_future(engine.create(who, name))
        return JSONResponse(await _find(engine, who, name), 201)

    @app.get("/v1/streams", **returns(schemas.Streams))
    async def list_streams(who: str = owner) -> Response:
        return JSONResponse({"streams": await run_in_threadpool(engine.describe, who)})

    @app.get("/v1/streams/{name}", **returns(schemas.Stream))
    async def get_stream(name: StreamName, who: str = owner) -> Response:
        return JSONResponse(await _find(engine, who, name))

    @app.delete("/v1/streams/{name}", status_code=204)
    async def delete_stream(name: StreamName, who: str = owner) -> Response:
        await _check_exists(engine, who, name)
        await asyncio.wrap_future(engine.delete(f"{who}/{name}"))
        return Response(status_code=204)


def _add_changes(app: FastAPI, engine: Engine) -> None:
    def changing(what: str) -> Callable[..., Any]:
        async def change(name: StreamName, who: str = owner) -> Response:
            await _check_exists(engine, who, name)
            await asyncio.wrap_future(engine.change(f"{who}/{name}", what))
            return JSONResponse(await _find(engine, who, name))

        return change

    for what in ("freeze", "unfreeze", "reset", "rollback"):
        address = app.post(f"/v1/streams/{{name}}/{what}", name=what, operation_id=what, **returns(schemas.Stream))
        address(changing(what))


def _add_service(app: FastAPI, engine: Engine, tokens: Tokens) -> None:
    @app.get("/v1/model", **returns(schemas.Model))
    async def get_model(who: str = owner) -> Response:
        sizes = {"state_bytes": engine.live.state_bytes, "limits": asdict(engine.limits)}
        rollout = engine.shadow is not None and tokens.operates(who)
        return JSONResponse({**asdict(engine.served), **sizes, "rollout": rollout})

    @app.get("/v1/alarms", **returns(schemas.Alarms))
    async def get_alarms(who: str = owner) -> Response:
        return JSONResponse({"alarms": engine.alarms.of(who)})

    @app.get("/v1/audit", **returns(schemas.Audit))
    async def get_audit(who: str = owner) -> Response:
        return JSONResponse({"events": await run_in_threadpool(engine.journal.audit, who)})


def _add_batches(app: FastAPI, engine: Engine) -> None:
    decoder = Decoder(engine.served.side, engine.limits, Resize.parse(engine.served.resize))
    body = {"requestBody": {"required": True, "content": BODY}}

    @app.post("/v1/streams/{name}/batches", openapi_extra=body, **returns(schemas.Answer))
    async def send_batch(
        name: StreamName, request: Request, idempotency_key: IdempotencyKey = None, who: str = owner
    ) -> Response:
        if idempotency_key is not None and not KEY.fullmatch(idempotency_key):
            problem = f"the Idempotency-Key is {idempotency_key[:40]!r}"
            raise Refused(422, f"{problem}; expected 1 to 128 printable ASCII characters without spaces")
        await _check_exists(engine, who, name)
        stream = f"{who}/{name}"
        if engine.room.open:  # else the body is read first: a connection that closes with unread data loses the answer
            engine.room.check(stream)
        body = await read(request, engine.limits)
        with engine.room.coming(stream):
            images, content = await unless_gone(decoder.decode(body, stream, request.state.share), request)
        del body  # so that it takes no memory while the batch waits
        waiting = engine.batch(stream, images, idempotency_key, content)
        answer, before = await answered(waiting, request, engine.limits.wait_s)
        return JSONResponse(answer, headers={"Idempotent-Replay": "true"} if before else None)

    @app.get("/v1/streams/{name}/batches", **returns(schemas.Reports))
    async def list_batches(name: StreamName, last: Last = 100, who: str = owner) -> Response:
        await _check_exists(engine, who, name)
        return JSONResponse({"reports": await run_in_threadpool(engine.journal.reports, f"{who}/{name}", last)})

    @app.get("/v1/streams/{name}/reports", response_class=StreamingResponse)
    async def follow_reports(name: StreamName, request: Request, who: str = owner) -> StreamingResponse:
        await _check_exists(engine, who, name)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Json | None](FEED)
        stop = engine.feeds.listen(f"{who}/{name}", lambda report: loop.call_soon_threadsafe(_put, queue, report))
        return StreamingResponse(_feed(queue, stop, request), media_type="text/event-stream")


def _add_labels(app: FastAPI, engine: Engine) -> None:
    @app.put("/v1/streams/{name}/batches/{number}/labels", **returns(schemas.Report))
    async def label_batch(name: StreamName, number: BatchNumber, given: Labels, who: str = owner) -> Response:
        await _check_exists(engine, who, name)
        largest, classes = max(given.labels), len(engine.served.classes)
        if largest >= classes:
            raise Refused(
                422, f"label {largest} is out of range; expected 0 to {classes - 1}. GET /v1/model lists the classes"
            )
        found = await run_in_threadpool(engine.journal.label, f"{who}/{name}", number, given.labels)
        if found is None:
            advice = f"GET /v1/streams/{name}/batches lists them"
            raise Refused(404, f"batch {number} is not kept; expected one of the stream's last {KEPT}. {advice}")
        if isinstance(found, str):
            raise Refused(422, f"{found}; expected one for each image")
        return JSONResponse(found)


def _put(queue: asyncio.Queue[Json | None], report: Json | None) -> None:
    """Queue a report; a reader that does not keep up loses the oldest."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(report)


async def _feed(queue: asyncio.Queue[Json | None], stop: Callable[[], None], request: Request) -> AsyncIterator[str]:
    """Yield server-sent events until there are no more or the reader is gone."""
    try:
        yield ": listening\n\n"
        while not await request.is_disconnected():
            try:
                report = await asyncio.wait_for(queue.get(), QUIET)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if report is None:
                return
            yield f"event: report\ndata: {json.dumps(report)}\n\n"
    finally:
        stop()
