"""The service on a Ray cluster: several engines, every stream pinned to one of them, behind one address.

A shard is the whole service of one process, in a folder of its own. The front looks at a request's owner and stream and
passes it to the shard that their hash gives; it decodes nothing and keeps nothing.
"""

import dataclasses
import json
import re
import secrets
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from .._internal.checks import count
from .._internal.hashing import hash_bytes
from .admission import Admission
from .comparison import compare
from .limits import Limits, Refused
from .middleware import error_response
from .server import Service
from .tokens import Tokens

STREAM = re.compile(r"/v1/streams/([^/]+)")
CANONICAL = re.compile(r"/|(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
ROLLOUT = re.compile(r"/v1/rollout(/switch)?")
FEED = re.compile(r"/v1/streams/[^/]+/reports")
Whole = tuple[str, str, list[tuple[bytes, bytes]], bytes]  # verb, address, headers, body: a request that travels
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
DROPPED = {b"content-length", b"transfer-encoding", b"connection"}  # set again by the next hop


def shard_of(owner: str, stream: str, shards: int) -> int:
    """Return the number of a stream's shard; the same on every machine and in every version."""
    return int.from_bytes(hash_bytes([f"{owner}/{stream}".encode()], size=8), "big") % shards


class Shard:
    """One engine and its application."""

    def __init__(self, service: Service, tokens: Tokens) -> None:
        import httpx

        from .app import create_app

        app = create_app(service.engine(), tokens)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://shard", timeout=None)

    async def handle(self, request: Whole) -> Answer:
        verb, address, headers, body = request
        answer = await self.client.request(verb, address, headers=headers, content=body)
        kept = [(name, value) for name, value in answer.headers.raw if name.lower() not in DROPPED]
        return answer.status_code, kept, answer.content


class Front:
    """Passes every request to the shard of its stream, and merges lists from all shards."""

    def __init__(self, tokens: Tokens, limits: Limits, *shards: Any) -> None:
        self.admission, self.shards = Admission(tokens, limits), shards

    async def __call__(self, request: Request) -> Response:
        try:
            _check_path(request.scope)
            owner = await self.admission.owner(request.scope)
            with self.admission.enter(owner, request.scope, request.receive) as body:
                content = b"".join([part async for part in Request(request.scope, body.receive).stream()])
                return await self._route(owner, request, content)
        except Refused as error:
            return error_response(error.status, error.message, error.retry_after)

    async def _route(self, owner: str, request: Request, body: bytes) -> Response:
        path = str(request.scope["path"])
        found = STREAM.match(path)
        if FEED.fullmatch(path):
            raise Refused(404, "a cluster has no feed of reports; poll GET /v1/streams/NAME/batches")
        if found is not None or (request.method, path) == ("POST", "/v1/streams"):
            name, body = (found[1], body) if found is not None else _name_stream(body)
            return _respond(await self._ask(shard_of(owner, name, len(self.shards)), request, body))
        if request.method == "GET" and path in MERGED:
            answers = [await self._ask(shard, request, body) for shard in range(len(self.shards))]
            return _merge(answers, MERGED[path])
        if ROLLOUT.fullmatch(path):
            return _merge_rollouts([await self._ask(shard, request, body) for shard in range(len(self.shards))])
        return _respond(await self._ask(0, request, body))

    async def _ask(self, shard: int, request: Request, body: bytes) -> Answer:
        query = request.scope["query_string"].decode("latin-1")
        address = request.scope["path"] + (f"?{query}" if query else "")
        headers = [(name, value) for name, value in request.headers.raw if name not in DROPPED]
        if body and "content-type" not in request.headers:
            headers.append((b"content-type", b"application/json"))
        return cast(Answer, await self.shards[shard].handle.remote((request.method, address, headers, body)))


def _check_path(scope: Scope) -> None:
    """Refuse an address that a shard could read differently, which would lead a stream's requests to two shards."""
    raw = bytes(scope.get("raw_path") or b"")
    if b"%" in raw or not CANONICAL.fullmatch(str(scope["path"])):
        expected = "expected letters, digits, '.', '_' or '-' between slashes, and no '.' after a slash"
        raise Refused(404, f"there is nothing at this address; {expected}")


MERGED = {
    "/v1/streams": ("streams", "name", False), "/v1/audit": ("events", "time", True),
    "/v1/alarms": ("alarms", "since", True),
}  # fmt: skip


def _name_stream(body: bytes) -> tuple[str, bytes]:
    """Return (name, body) of a new stream; a missing name is chosen here, since the shard follows from it."""
    try:
        content = json.loads(body) if body.strip() else {}
    except ValueError:
        return "", body  # any shard can report what is wrong
    if isinstance(content, dict) and content.get("name") is None:
        content["name"] = f"stream-{secrets.token_hex(6)}"
        body = json.dumps(content).encode()
    return (str(content["name"]) if isinstance(content, dict) else ""), body


def _respond(answer: Answer) -> Response:
    status, headers, body = answer
    response = Response(body, status)
    response.raw_headers = [*headers, (b"content-length", str(len(body)).encode())]
    return response


def _merge(answers: list[Answer], how: tuple[str, str, bool]) -> Response:
    field, key, newest_first = how
    for answer in answers:
        if answer[0] != 200:
            return _respond(answer)
    rows = [row for answer in answers for row in json.loads(answer[2])[field]]
    body = json.dumps({field: sorted(rows, key=lambda row: row[key], reverse=newest_first)}).encode()
    return _respond((*answers[0][:2], body))


def _merge_rollouts(answers: list[Answer]) -> Response:
    """Add what all shards have counted. A switch that reached only some of them can be repeated."""
    for answer in answers:
        if answer[0] != 200:
            return _respond(answer)
    found = [json.loads(answer[2]) for answer in answers]
    if len({one["live"]["version"] for one in found}) > 1:
        return error_response(409, "the shards answer with different models; repeat the switch, which some have missed")
    counts = {name: sum(one["counts"][name] for one in found) for name in found[0]["counts"]}
    merged = found[0] | compare(counts) | {"waiting": sum(one["waiting"] for one in found)}
    if "switched" in merged:
        merged["switched"] = any(one["switched"] for one in found)
    return _respond((*answers[0][:2], json.dumps(merged).encode()))


def deployment(service: Service, tokens: Tokens, shards: int) -> Any:
    """Return a Ray Serve application: `ray.serve.run(deployment(service, tokens, 4))`."""
    from ray import serve

    count(shards=shards)
    bound = [
        serve.deployment(name=f"shard-{number}", num_replicas=1, max_ongoing_requests=256)(Shard).bind(
            dataclasses.replace(service, folder=service.folder / f"shard-{number}-of-{shards}"), tokens
        )
        for number in range(shards)
    ]
    front = serve.deployment(name="front", num_replicas=1, max_ongoing_requests=1024)(Front)
    return front.bind(tokens, service.limits, *bound)
