"""What every address does, in words and with examples, for /openapi.json and the API page."""

from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from . import examples

ABOUT = """
Adaptation over HTTP: one model is in memory, and every **stream** has an adapted state of its own.

Create a stream, send it batches of images, and read the answers. If the service has tokens, press **Authorize** and
give yours. Every answer has an id in the header `X-Request-ID`, which the log of the service names too. You may
send one of your own.
"""
TAGS = {
    "Streams": "Create, list, change and delete streams.",
    "Batches": "Send images and labels, and read what came of them.",
    "Service": "What is served, and what has happened.",
    "Probes": "For machines that watch the service. They need no token.",
}


@dataclass(frozen=True)
class Operation:
    tag: str
    summary: str
    description: str
    answer: Any = None  # an example of a good one
    kind: str = "application/json"  # of the answer
    bodies: dict[str, Any] = field(default_factory=dict)  # an example of a request's body for every type
    errors: dict[str, Any] = field(default_factory=dict)  # examples by status that are not as in `examples.ERRORS`


def _change(summary: str, description: str) -> Operation:
    return Operation("Streams", summary, description, examples.STREAM)


NOT_FOR_ALL = {
    status: {"error": problem, "request_id": examples.REQUEST_ID}
    for status, problem in {
        "403": "the token is one of 'anna', and a roll-out concerns all owners; expected a token of the owner "
        "'operator', whom the tokens file may name",
        "404": "no model is rolled out; start the service with --shadow NEW to begin",
        "422": "version 'b1c5' is neither live nor the shadow; expected b1c53e9d7a1f0c62 or 40623f41a4f66433",
    }.items()
}
ABOUT_BODIES = ("408", "413", "415")  # errors that come only to requests with a body
ABOUT_CHANGES = ("409", "507")  # and only to requests that change something
STREAM, BATCHES = "/v1/streams/{name}", "/v1/streams/{name}/batches"
OPERATIONS = {
    ("post", "/v1/streams"): Operation(
        "Streams", "Create a stream", "The body is optional; without a name the service chooses one.",
        examples.STREAM, bodies={"application/json": {"name": "gate-7"}},
    ),
    ("get", "/v1/streams"): Operation(
        "Streams", "List your streams", "Streams of other owners are not listed.", {"streams": [examples.STREAM]}
    ),
    ("get", STREAM): Operation("Streams", "Show a stream", "Its counters, accuracy and health.", examples.STREAM),
    ("delete", STREAM): Operation(
        "Streams", "Delete a stream", "Its state, its answers and its keys are deleted. This cannot be undone."
    ),
    ("post", f"{STREAM}/freeze"): _change("Freeze a stream", "From now on it only predicts, and learns nothing."),
    ("post", f"{STREAM}/unfreeze"): _change("Unfreeze a stream", "It learns again."),
    ("post", f"{STREAM}/reset"): _change(
        "Reset a stream", "It returns to the source model and to its first draw of views."
    ),
    ("post", f"{STREAM}/rollback"): _change(
        "Roll a stream back", "It returns to its last healthy state; another call goes further back."
    ),
    ("post", BATCHES): Operation(
        "Batches", "Send a batch", "The batch is answered, and the stream learns from it. Send either a form with a "
        "part `images` for each PNG, JPEG or WebP file, or one NumPy file of uint8 values, (B,H,W,3) or (B,3,H,W), of "
        "the model's size. With an `Idempotency-Key`, a batch is applied once, however often it arrives.",
        examples.ANSWER,
        bodies={
            "multipart/form-data": {"images": ["(the bytes of 1.png)", "(the bytes of 2.png)"]},
            "application/x-npy": "(the bytes that numpy.save writes)",
        },
    ),
    ("get", BATCHES): Operation(
        "Batches", "List the last reports", "Oldest first. The service keeps those of a stream's last 256 batches.",
        {"reports": [examples.REPORT]},
    ),
    ("put", f"{BATCHES}/{{number}}/labels"): Operation(
        "Batches", "Send true labels", "One for each image of the batch. They give the accuracy and teach nothing.",
        {**examples.REPORT, "accuracy": 50.0}, bodies={"application/json": {"labels": [0, 1]}},
    ),
    ("get", f"{STREAM}/reports"): Operation(
        "Batches", "Follow a stream", "Server-sent events: one report for every batch from now on. The answer does not "
        "end by itself, so this page cannot show it; use `curl -N`.",
        'event: report\ndata: {"stream": "gate-7", "number": 12}\n\n', kind="text/event-stream",
    ),
    ("get", "/v1/model"): Operation("Service", "Show the model", "What is served, and the limits.", examples.MODEL),
    ("get", "/v1/rollout"): Operation(
        "Service", "Compare a new model", "The live model, the shadow and how their answers compare. It needs the "
        "token of the owner `operator`, if there are tokens. Without a roll-out the answer is 404.",
        examples.ROLLOUT, errors=NOT_FOR_ALL,
    ),
    ("post", "/v1/rollout/switch"): Operation(
        "Service", "Switch to a new model", "This version answers from now on, and the other one is the shadow. If it "
        "is live already, nothing changes. It needs the token of the owner `operator`, if there are tokens.",
        {**examples.ROLLOUT, "switched": True}, bodies={"application/json": {"to": "40623f41a4f66433"}},
        errors=NOT_FOR_ALL,
    ),
    ("get", "/v1/alarms"): Operation(
        "Service", "List active alarms", "Those of all your streams, newest first.",
        {"alarms": [{"stream": "gate-7", **examples.ALARM}]},
    ),
    ("get", "/v1/audit"): Operation(
        "Service", "List events", "Your last 100, newest first: what was created, deleted or changed.",
        {"events": [examples.EVENT]},
    ),
    ("get", "/livez"): Operation("Probes", "Does the process live?", "Restart it if not.", {"status": "ok"}),
    ("get", "/healthz"): Operation("Probes", "Does the process live?", "The same as `/livez`.", {"status": "ok"}),
    ("get", "/readyz"): Operation(
        "Probes", "Are batches accepted?", "If not, the answer is 503 with the reasons.", {"status": "ok"},
        errors={"503": examples.NOT_READY},
    ),
}  # fmt: skip


def describe_operations(app: FastAPI) -> None:
    """Complete what FastAPI finds out by itself about the application's addresses."""
    found = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = found()
            schema["info"]["description"] = ABOUT.strip()
            schema["tags"] = [{"name": name, "description": words} for name, words in TAGS.items()]
            for path, operations in schema["paths"].items():
                for verb, operation in operations.items():
                    if (verb, path) in OPERATIONS:
                        _describe(operation, verb, OPERATIONS[verb, path])
        return app.openapi_schema or {}

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's documented way


def _describe(operation: dict[str, Any], verb: str, told: Operation) -> None:
    operation |= {"tags": [told.tag], "summary": told.summary, "description": told.description}
    for kind, example in told.bodies.items():
        operation["requestBody"]["content"][kind]["example"] = example
    if told.tag == "Probes":  # they need no token and have no body
        operation["responses"] = {status: operation["responses"][status] for status in ("200", *told.errors)}
    else:
        unlikely = () if "requestBody" in operation else ABOUT_BODIES
        for status in (*unlikely, *(ABOUT_CHANGES if verb == "get" else ())):
            operation["responses"].pop(status, None)
    for status, response in operation["responses"].items():
        if status in examples.ERRORS:
            body = {"error": examples.ERRORS[status], "request_id": examples.REQUEST_ID}
            response["content"]["application/json"]["example"] = told.errors.get(status, body)
        elif told.answer is not None:
            response.setdefault("content", {}).setdefault(told.kind, {})["example"] = told.answer
