import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.errors import InvalidValueError
from safer_tta.serve.limits import Limits, Refused
from safer_tta.serve.middleware import AccessControl
from safer_tta.serve.server import check_address
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import TOKENS, pictures, serving


@pytest.fixture(scope="module")
def guarded(source_file, tmp_path_factory):
    """A service with two owners."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokens.json").write_text(json.dumps({"anna": "a" * 20, "bert": "b" * 20}))
    with serving(source_file, folder / "served", "--tokens", str(folder / "tokens.json")) as running:
        yield running


def test_owners_see_only_their_own_streams(guarded):
    with Client(guarded.url, "a" * 20) as anna, Client(guarded.url, "b" * 20) as bert:
        anna.create("mine")
        with pytest.raises(ServiceError, match="no stream"):
            bert.stream("mine")
        bert.create("mine")  # a name is taken only for its owner
        assert [s["owner"] for s in bert.streams()] == ["bert"]
        anna.send("mine", pictures(1, 2)[0])
        assert bert.stream("mine")["batches"] == 0
        assert {e["owner"] for e in bert.audit()} == {"bert"}


def test_requests_without_a_token_are_refused_before_they_are_read(guarded):
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "a" * 20}):
        for path in ("/v1/streams", "/v1/model", "/v1/audit"):
            answer = httpx.get(guarded.url + path, headers=header)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    for content in (b"{", b"x" * 10_000_000):
        assert httpx.post(guarded.url + "/v1/streams", content=content).status_code == 401
    line = socket.create_connection(("127.0.0.1", guarded.port), timeout=10)
    with line, contextlib.suppress(ConnectionError):  # it may be closed before the request is sent
        for part in [b"GET / HTTP/1.1\r\n", *[b"X: " + b"x" * 1000 + b"\r\n"] * 1000]:
            line.sendall(part)
        assert line.recv(100).startswith(b"HTTP/1.1 4") or line.recv(1) == b""
    assert httpx.get(guarded.url + "/healthz").status_code == 200


def test_invalid_token_files_are_refused(tmp_path):
    same = '{"a": "0123456789abcdef", "b": "0123456789abcdef"}'
    blank = '{"a": "                    "}'
    for content in ("", "[]", "{}", '{"a/b": "0123456789abcdef"}', '{"a": "short"}', same, blank):
        (tmp_path / "tokens.json").write_text(content)
        with pytest.raises(InvalidValueError, match="expected"):
            Tokens.read(tmp_path / "tokens.json")


def test_a_token_is_compared_to_its_end():
    for number in range(3000):
        with pytest.raises(Refused):
            TOKENS.owner(f"Bearer {'a' * 19}{number}")
    assert [TOKENS.owner(f"Bearer {letter * 20}") for letter in "ab"] == ["anna", "bert"]


def test_pages_of_other_sites_are_refused(server):
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.port}", "Origin": "http://evil.example"},
    ):
        for verb in ("get", "post"):
            assert httpx.request(verb, server.url + "/v1/streams", headers=headers).status_code == 403, headers
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert httpx.get(server.url + "/v1/streams", headers=own).status_code == 200


def test_addresses_beyond_this_machine_need_tokens():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, Tokens())
    for host in ("0.0.0.0", "192.168.1.5", "example.org"):
        with pytest.raises(InvalidValueError, match="--tokens"):
            check_address(host, Tokens())
        check_address(host, Tokens({"a": "0123456789abcdef"}))


def test_every_answer_has_security_headers(server):
    for path in ("/", "/docs", "/v1/streams", "/nothing", "/metrics", "/dashboard/dashboard.js"):
        headers = httpx.get(server.url + path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_no_path_reaches_other_files(server):
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "index.html", "/etc/passwd", "%2fetc%2fpasswd"):
        assert httpx.get(f"{server.url}/dashboard/{name}").status_code == 404


def test_a_request_that_is_half_sent_when_the_service_stops_is_refused_and_not_a_traceback():
    """The server cancels what it has waited for long enough; uvicorn logs a cancellation as a failure."""

    async def read_all(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    async def stop() -> list:
        waiting, sent = asyncio.Event(), []
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            if messages:
                return messages.pop()
            waiting.set()
            return await asyncio.Event().wait()  # for ever

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/streams", "headers": [(b"host", b"127.0.0.1")]}
        control = AccessControl(read_all, Tokens(), Limits())
        request = asyncio.create_task(control(scope, receive, send))
        await waiting.wait()
        request.cancel()
        await request
        assert not control.admission.memory.held
        assert not control.admission.requests.held
        return sent

    start, body = asyncio.run(stop())
    assert start["status"] == 503
    assert "stopping" in json.loads(body["body"])["error"]
