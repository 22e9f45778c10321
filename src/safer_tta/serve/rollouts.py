"""The addresses of a roll-out: how the shadow compares with the live model, and the switch."""

import asyncio

from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from . import schemas
from .engine import Engine
from .limits import Refused
from .routes import owner, returns
from .tokens import OPERATOR, Tokens


class To(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: str = Field(max_length=64)


def add_rollout(app: FastAPI, engine: Engine, tokens: Tokens) -> None:
    async def check_operator(who: str = owner) -> str:
        """Refuse all owners but the operator, since a model concerns all of them."""
        if not tokens.operates(who):
            problem = f"the token is one of {who!r}, and a roll-out concerns all owners"
            raise Refused(403, f"{problem}; expected a token of the owner {OPERATOR!r}, whom the tokens file may name")
        return who

    operator = Depends(check_operator)

    @app.get("/v1/rollout", **returns(schemas.Rollout))
    async def get_rollout(who: str = operator) -> Response:
        return JSONResponse(await run_in_threadpool(engine.rollout))

    @app.post("/v1/rollout/switch", **returns(schemas.Switched))
    async def switch_rollout(wanted: To, who: str = operator) -> Response:
        switched = await asyncio.wrap_future(engine.switch(wanted.to, who))
        return JSONResponse({"switched": switched, **await run_in_threadpool(engine.rollout)})
