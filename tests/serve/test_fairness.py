"""What one client does must not keep the others from being answered: a real service, and clients that mean ill."""

import contextlib
import io
import json
import os
import re
import socket
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from safer_tta.client import Client
from safer_tta.serve import limits
from tests.processes import run_safer
from tests.serve.helpers import CHEAP, NPY, array_file, meanwhile, pictures, serving

ANNA, BERT = "a" * 20, "b" * 20
SERVICE = [word for name, value in CHEAP.items() for word in (f"--{name}", value)]
PROBES = ("/healthz", "/readyz")
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def impatient(*arguments):
    """Be `safer serve` with short deadlines and few connections."""
    short = {"headers_s": 1.0, "idle_s": 2.0, "body_s": 2.0}
    known = limits.Limits.__dataclass_fields__
    whole = limits.Limits
    limits.Limits = lambda **given: whole(**{**given, **{n: v for n, v in short.items() if n in known}})
    run_safer(*arguments)


@contextlib.contextmanager
def two_owners(source_file, tmp_path, *options, **how):
    (tmp_path / "tokens.json").write_text(json.dumps({"anna": ANNA, "bert": BERT}))
    with serving(
        source_file, tmp_path / "served", "--tokens", str(tmp_path / "tokens.json"), *SERVICE, *options, **how
    ) as server:
        with Client(server.url, ANNA) as anna, Client(server.url, BERT) as bert:
            anna.create("a")
            bert.create("b")
        yield server


def opened(server, request=b""):
    line = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    line.sendall(request)
    return line


def head(length, token=ANNA, stream="a"):
    lines = [f"POST /v1/streams/{stream}/batches HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}"]
    return "\r\n".join([*lines, "Content-Type: application/x-npy", length, "", ""]).encode()


def ended(line, seconds=30.0):
    """Return what a connection says until the service closes it."""
    line.settimeout(seconds)
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := line.recv(65536):
            said += part
    return said


def answer_to_bert(server):
    """Send a small batch once, without trying again."""
    content = array_file(pictures(1, 2)[0])
    headers = {**NPY, "Authorization": f"Bearer {BERT}"}
    return httpx.post(f"{server.url}/v1/streams/b/batches", content=content, headers=headers, timeout=60).status_code


def test_stalled_uploads_of_one_owner_leave_room_for_the_others(source_file, tmp_path):
    size = 64 * 2**20
    with two_owners(source_file, tmp_path) as server, contextlib.ExitStack() as lines:
        for _ in range(16):
            line = lines.enter_context(opened(server, head(f"Content-Length: {size}")))
            with contextlib.suppress(OSError):  # those that are beyond anna's share are refused
                line.sendall(bytes(size - 16))
        assert [answer_to_bert(server) for _ in range(10)] == [200] * 10
        refused = r'^safer_tta_requests_refused_total\{reason="uploads",status="429"\} [1-9]'
        assert re.search(refused, httpx.get(server.url + "/metrics").text, re.MULTILINE)


@pytest.mark.parametrize("kind", ["stalled", "slow drip", "endless chunk"])
def test_a_body_that_does_not_arrive_is_ended(source_file, tmp_path, kind):
    length = "Transfer-Encoding: chunked" if kind == "endless chunk" else "Content-Length: 1000000"
    start = b"FFFFFFFFFFFFFFFF\r\n" if kind == "endless chunk" else b"x"
    with two_owners(source_file, tmp_path, program=impatient) as server:
        line = opened(server, head(length) + start)

        def drip(stop):
            while not stop.wait(0.2):
                with contextlib.suppress(OSError):
                    line.sendall(b"x")

        with line, meanwhile(*([drip] if kind == "slow drip" else [])):
            assert ended(line).startswith(b"HTTP/1.1 408")
        with Client(server.url, ANNA) as anna:
            assert anna.stream("a")["batches"] == 0
            assert anna.send("a", pictures(1, 2)[0])["number"] == 1


def resident(server):
    """Return the memory of the service in MB."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_memory_is_given_back_after_a_burst_of_uploads(source_file, tmp_path):
    with two_owners(source_file, tmp_path) as server:
        assert answer_to_bert(server) == 200
        before = resident(server)
        with contextlib.ExitStack() as lines:
            size = 60 * 2**20
            sent = [lines.enter_context(opened(server, head(f"Content-Length: {size}"))) for _ in range(6)]
            for line in sent:
                line.sendall(bytes(size - 1))
            assert resident(server) > before + 200
            for line in sent:
                line.sendall(b"x")
                assert line.recv(100).startswith(b"HTTP/1.1 422")  # it is no array
        deadline = time.monotonic() + 30
        while resident(server) > before + 100 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert resident(server) < before + 100


def large_picture():
    file = io.BytesIO()
    Image.new("RGB", (4000, 3999)).save(file, "PNG")
    return file.getvalue()


def test_large_pictures_of_one_owner_delay_the_others_by_one_picture(source_file, tmp_path):
    """The others are answered while most of the large pictures still wait."""
    form = [("images", ("a.png", large_picture()))] * 16
    with two_owners(source_file, tmp_path) as server:
        answers: list[int] = []

        def send(stop):
            headers = {"Authorization": f"Bearer {ANNA}"}
            with contextlib.suppress(httpx.HTTPError):
                answers.append(
                    httpx.post(
                        f"{server.url}/v1/streams/a/batches", files=form, headers=headers, timeout=300
                    ).status_code
                )

        with meanwhile(*[send] * 8):
            time.sleep(2)  # until they are being decoded
            assert [answer_to_bert(server) for _ in range(3)] == [200] * 3
            assert len(answers) < 8
            server.kill()


def test_idle_connections_and_half_sent_headers_do_not_keep_probes_out(source_file, tmp_path):
    with two_owners(source_file, tmp_path) as server, contextlib.ExitStack() as lines:
        for number in range(2600):
            half = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: " if number >= 2100 else b""
            lines.enter_context(opened(server, half))
        for path in PROBES * 3:
            assert httpx.get(server.url + path, timeout=30).status_code == 200
        assert answer_to_bert(server) == 200


def test_the_longest_idle_connection_makes_room(source_file, tmp_path):
    with two_owners(source_file, tmp_path, "--connections", "32") as server, contextlib.ExitStack() as lines:
        opened_in_order = [lines.enter_context(opened(server)) for _ in range(40)]
        assert httpx.get(server.url + "/healthz", timeout=30).status_code == 200
        assert ended(opened_in_order[0]) == b""
        newest = opened_in_order[-1]
        newest.sendall(WHOLE)
        assert newest.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: 127", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"]
)
def test_a_connection_without_a_request_is_closed(source_file, tmp_path, sent):
    with two_owners(source_file, tmp_path, program=impatient) as server, opened(server, sent) as line:
        said = ended(line)
        assert said.startswith(b"HTTP/1.1 200") if sent == WHOLE else said == b""


def test_a_header_that_drips_is_ended(source_file, tmp_path):
    with two_owners(source_file, tmp_path, program=impatient) as server:
        line = opened(server, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")

        def drip(stop):
            while not stop.wait(0.1):
                with contextlib.suppress(OSError):
                    line.sendall(b"x")

        with line, meanwhile(drip):
            assert ended(line) == b""


def test_connections_with_stalled_requests_do_not_keep_probes_out(source_file, tmp_path):
    with two_owners(source_file, tmp_path, "--connections", "32") as server, contextlib.ExitStack() as lines:
        for _ in range(60):
            lines.enter_context(opened(server, head("Content-Length: 1000000") + b"x"))
        for path in PROBES * 3:
            assert httpx.get(server.url + path, timeout=30).status_code == 200
        assert answer_to_bert(server) == 200


@pytest.mark.parametrize("header", ["Host: [::1", "Host: a b", "Host: 127.0.0.1\r\nOrigin: http://["])
def test_a_malformed_host_or_origin_is_refused_with_words(source_file, tmp_path, header):
    with two_owners(source_file, tmp_path) as server:
        origin = "Host: 127.0.0.1\r\n" if header.startswith("Origin") else ""
        request = f"GET /v1/model HTTP/1.1\r\n{origin}{header}\r\nConnection: close\r\n\r\n".encode()
        with opened(server, request) as line:
            said = ended(line)
        assert said.startswith(b"HTTP/1.1 400")
        assert b"nosniff" in said
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]
        assert "Traceback" not in server.log.read_text()


def test_tokens_are_read_again_when_their_file_changes(source_file, tmp_path):
    """A new token beside the old one, then without it; a damaged file changes nothing."""
    path = tmp_path / "tokens.json"

    def status(server, token):
        return httpx.get(server.url + "/v1/streams", headers={"Authorization": f"Bearer {token}"}).status_code

    def write(content):
        (tmp_path / "new").write_text(content)
        os.replace(tmp_path / "new", path)

    with two_owners(source_file, tmp_path) as server:

        def told(content, token, expected):
            write(content)
            os.kill(server.process.pid, 1)  # SIGHUP
            deadline = time.monotonic() + 30
            while status(server, token) != expected and time.monotonic() < deadline:
                time.sleep(0.05)
            return status(server, token)

        new = "n" * 20
        assert told(json.dumps({"anna": [new, ANNA], "bert": BERT}), new, 200) == 200
        assert [status(server, token) for token in (ANNA, BERT)] == [200, 200]
        assert told(json.dumps({"anna": [new]}), ANNA, 401) == 401
        assert [status(server, token) for token in (new, BERT)] == [200, 401]
        assert told('{"anna": [', new, 200) == 200
        newer = "m" * 20
        assert told(json.dumps({"anna": newer}), newer, 200) == 200
        assert status(server, new) == 401


def test_a_client_that_is_gone_does_not_keep_its_place_in_the_queue(source_file, tmp_path):
    """Forms that nobody waits for any more are not applied, but the first, which had begun."""
    with serving(source_file, tmp_path / "served", "--views", "8") as server, Client(server.url) as asking:
        asking.create("a")
        content = array_file(np.concatenate(pictures(1, 128)))
        lines = [opened(server) for _ in range(8)]
        for line in lines:
            request = f"POST /v1/streams/a/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {NPY['Content-Type']}"
            line.sendall(f"{request}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        while "safer_tta_queue 7.0" not in httpx.get(server.url + "/metrics").text:
            time.sleep(0.01)
        for line in lines:
            line.close()
        after = asking.send("a", pictures(1, 2)[0])
        assert after["number"] <= 3
