"""A small server on loopback that speaks docs/serve.md and can be made to fail, and a client of it."""

import io
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

from safer_tta.client import Client

TOKEN = "s3cret-t0ken"
CLASSES = ["cat", "dog", "horse"]
FEED = (
    ": hello\n\n"
    'event: report\ndata: {"number": 0,\ndata:  "alarm": ""}\n\n'
    ": still here\n\n"
    "event: other\ndata: {}\n\n"
    'event: report\r\nid: 7\r\ndata:{"number": 1, "views": ["a\u2028b → c"]}\r\n\r\n'
    'event: report\ndata: {"number": 2'  # cut off: no event without an empty line
).encode()


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers["idempotency-key"]


@dataclass
class Service:
    """What the server knows, its requests, and how the next ones fail.

    A fault is "drop" (hang up), "lose" (do it, then hang up), or (status, headers, body).
    """

    url: str = ""
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    labels: dict[int, list[int]] = field(default_factory=dict)
    feed: bytes = FEED
    classes: list[Any] = field(default_factory=lambda: list(CLASSES))
    suspicion: float | None = None

    def asked(self, method: str, ending: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and r.path.endswith(ending)]

    def answer(self, request: Request) -> tuple[int, Any]:
        match [unquote(part) for part in request.path.strip("/").split("/")[1:]], request.method:
            case ["model"], "GET":
                return 200, {"version": "1", "classes": self.classes, "limits": {}}
            case ["audit"], "GET":
                return 200, {"events": [{"time": 1.0, "owner": "anna", "stream": "gate-7", "what": "create"}]}
            case ["streams"], "GET":
                return 200, {"streams": list(self.streams.values())}
            case ["streams"], "POST":
                name = json.loads(request.body)["name"] if request.body else "made-up"
                self.streams[name] = {"name": name, "batches": 0, "frozen": False, "keys": {}}
                return 201, self.streams[name]
            case ["streams", name, *_], _ if name not in self.streams:
                return 404, {"error": f"there is no stream {name}"}
            case ["streams", name], "GET":
                return 200, self.streams[name]
            case ["streams", name], "DELETE":
                del self.streams[name]
                return 204, None
            case ["streams", name, "batches"], "POST":
                return self.batch(self.streams[name], request)
            case ["streams", name, "batches"], "GET":
                last = int(request.query["last"][0])
                return 200, {"reports": [{"number": n} for n in range(self.streams[name]["batches"])][-last:]}
            case ["streams", name, "batches", number, "labels"], "PUT":
                self.labels[int(number)] = json.loads(request.body)["labels"]
                return 200, {"stream": name, "number": int(number), "accuracy": 50.0}
            case ["streams", name, "freeze" | "unfreeze" | "reset" | "rollback" as what], "POST":
                stream = self.streams[name]
                stream["frozen"] = what == "freeze"
                stream[what] = stream.get(what, 0) + 1
                return 200, stream
        return 404, {"error": f"there is no {request.method} {request.path}"}

    def batch(self, stream: dict[str, Any], request: Request) -> tuple[int, Any]:
        if request.key not in stream["keys"]:
            count = len(pictures(request))
            labels = [n % len(self.classes) for n in range(count)]
            stream["keys"][request.key] = {
                "stream": stream["name"],
                "number": stream["batches"],
                "labels": labels,
                "classes": [self.classes[n] for n in labels],
                "probabilities": [[1.0 if n == label else 0.0 for n in range(len(self.classes))] for label in labels],
                "suspicion": self.suspicion and [self.suspicion] * count,
                "abstain": [n == 0 for n in range(count)],
            }
            stream["batches"] += 1
        return 200, stream["keys"][request.key]


def pictures(request: Request) -> list[np.ndarray[Any, Any]]:
    """Read the images of a batch as a server does."""
    if request.headers["content-type"] == "application/x-npy":
        return list(np.lib.format.read_array(io.BytesIO(request.body), allow_pickle=False))
    return [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for _, content in parts(request)]


def parts(request: Request) -> list[tuple[str, bytes]]:
    """Return the header and the content of each part of a form, strictly parsed; libraries accept too much."""
    boundary = re.fullmatch(r"multipart/form-data; boundary=(\S+)", request.headers["content-type"])
    assert boundary
    first, *middle, last = request.body.split(b"--" + boundary[1].encode())
    assert (first, last) == (b"", b"--\r\n")
    split = [part.removeprefix(b"\r\n").removesuffix(b"\r\n").split(b"\r\n\r\n", 1) for part in middle]
    return [(header.decode(), content) for header, content in split]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    service: Service

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, address.path, parse_qs(address.query), headers, body)
        self.service.requests.append(request)
        fault = self.service.faults.pop(0) if self.service.faults else None
        if fault == "drop":
            self.close_connection = True
        elif isinstance(fault, tuple):
            self.reply(*fault)
        elif request.path.endswith("/reports") and request.path.split("/")[-2] in self.service.streams:
            self.feed()
        else:
            status, content = self.service.answer(request)
            if fault == "lose":
                self.close_connection = True
            else:
                self.reply(status, {}, b"" if content is None else json.dumps(content).encode())

    do_GET = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def feed(self) -> None:
        """Send the feed in pieces that split lines, events and characters."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for first in range(0, len(self.service.feed), 7):
            self.wfile.write(self.service.feed[first : first + 7])
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "*")
    made = Service()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"service": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the seconds that the client would have waited."""
    asked: list[float] = []
    monkeypatch.setattr("safer_tta.client.client.sleep", asked.append)
    return asked


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url, TOKEN) as connected:
        connected.create("gate-7")
        service.requests.clear()
        yield connected


def random_images(count: int = 3, side: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def png(image: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def refuse(status: int, words: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": words}).encode()
