"""What the addresses of the API share: who asks, and how an answer is described."""

from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel


def returns(schema: type[BaseModel], status: int = 200) -> dict[str, Any]:
    """Return options of an address whose answers have a schema. The API page shows it; answers are not checked."""
    described: dict[int | str, dict[str, Any]] = {status: {"model": schema, "description": schema.__name__.lower()}}
    return {"status_code": status, "response_class": JSONResponse, "response_model": None, "responses": described}


async def _owner(request: Request, _: Annotated[Any, Security(HTTPBearer(auto_error=False))]) -> str:
    """Return the owner that `AccessControl` has found."""
    return str(request.state.owner)


owner = Depends(_owner)
