"""What machines ask the service about itself: whether it lives, whether it takes batches, and its metrics."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from .engine import Engine
from .middleware import error_response
from .tokens import METRICS, Tokens


class Alive(BaseModel):
    status: str


class NotReady(BaseModel):
    error: str
    request_id: str
    reasons: dict[str, str]


def add_probes(app: FastAPI, engine: Engine, tokens: Tokens) -> None:
    @app.get("/healthz", response_model=Alive, name="healthz")
    @app.get("/livez", response_model=Alive)
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", response_model=Alive, responses={503: {"model": NotReady, "description": "not ready"}})
    async def readyz() -> Response:
        reasons = await run_in_threadpool(engine.readiness)
        if not reasons:
            return JSONResponse({"status": "ok"})
        problem = f"the service does not accept batches: {'; '.join(reasons.values())}"
        return error_response(503, problem, retry_after=5, more={"reasons": reasons})

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        who = getattr(request.state, "owner", "")
        owners = tokens.operates(who) or who == METRICS
        text = await run_in_threadpool(engine.metrics.text, owners=owners)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
