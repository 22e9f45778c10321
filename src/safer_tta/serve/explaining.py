"""What clients are told when a request cannot be answered: what came, what was expected, what to do."""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from ..errors import DamagedStreamError, JournalError, StorageError
from .limits import Refused
from .middleware import error_response

LONGEST = 60  # characters that are repeated of what came
# What was expected, by pydantic's name for the problem.
EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "missing": "a value",
    "model_attributes_type": "a JSON object, and the header Content-Type: application/json",
    "string_pattern_mismatch": "1 to 64 letters, digits, '.', '_' or '-', and no '.' at the start",
    "string_too_long": "at most {max_length} characters",
    "string_type": "text in quotes",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}


def explain_errors(app: FastAPI) -> None:
    """Answer every error of an application in the form of the API."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, Refused):
            return error_response(error.status, error.message, error.retry_after, error.reason)
        if error.status_code == 405:
            return _refuse_method(app, request)
        if error.status_code == 404:
            path = _show(request.scope["path"])
            return error_response(404, f"there is no address {path}; GET /docs shows all of them")
        return error_response(error.status_code, str(error.detail).lower())

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(422, "; ".join(map(explain, error.errors()[:3])))

    @app.exception_handler(JournalError)
    async def stored(_: Request, error: JournalError) -> JSONResponse:
        if isinstance(error, DamagedStreamError):
            return error_response(409, str(error))
        return error_response(507 if isinstance(error, StorageError) else 503, str(error), retry_after=5)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client will not read it

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> JSONResponse:
        advice = "send it again, and if that fails too, give the operator its request_id: the log says more"
        return error_response(500, f"the service failed at this request; {advice}")


def _refuse_method(app: FastAPI, request: Request) -> JSONResponse:
    matching = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in matching for method in getattr(route, "methods", ())}))
    problem = (
        f"{_show(request.method)} is not possible at this address; expected {allowed}. GET /docs shows all requests"
    )
    response = error_response(405, problem)
    response.headers["allow"] = allowed
    return response


def explain(problem: Mapping[str, Any]) -> str:
    """Return in our words what pydantic has found in a request."""
    kind, told = problem["type"], problem.get("ctx", {})
    where = ".".join(map(str, problem["loc"][1:])) or "the body"
    if kind == "json_invalid":
        return f"the body is not JSON ({told['error']}, at character {where}); expected an object, such as {{}}"
    if kind == "extra_forbidden":
        return f"the body has a field {_show(where)}, which is not known; GET /docs shows those that are"
    came = "missing" if kind == "missing" else _show(problem["input"])
    expected = EXPECTED.get(kind)
    return f"{where} is {came}; {problem['msg'] if expected is None else 'expected ' + expected.format(**told)}"


def _show(value: object) -> str:
    """Return what came as JSON, shortened."""
    text = json.dumps(value, default=lambda other: str(type(other).__name__))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
