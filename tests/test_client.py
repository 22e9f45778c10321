"""The client and `send_folder` against a small server on loopback that speaks docs/serve.md and can be made to fail."""

from __future__ import annotations

import copy
import email.utils
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("httpx")

from safer_tta import client as client_module
from safer_tta.client import Client, ServiceError
from safer_tta.send import send_folder
from tests.serving import free_port

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
    """What the server knows, what it was asked, and how the next requests go wrong.

    A fault is "drop" (hang up), "lose" (do it, then hang up), or (status, headers, body).
    """

    url: str = ""
    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    labels: dict[int, list[int]] = field(default_factory=dict)
    feed: bytes = FEED
    classes: list[Any] = field(default_factory=lambda: list(CLASSES))

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
                return 404, {"error": f"there is no stream {name}; create it with POST /v1/streams"}
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
                "abstain": [n == 0 for n in range(count)],
            }
            stream["batches"] += 1
        return 200, stream["keys"][request.key]


def pictures(request: Request) -> list[np.ndarray[Any, Any]]:
    """The images of a batch as a server reads them."""
    if request.headers["content-type"] == "application/x-npy":
        return list(np.lib.format.read_array(io.BytesIO(request.body), allow_pickle=False))
    return [np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) for _, content in parts(request)]


def parts(request: Request) -> list[tuple[str, bytes]]:
    """The header and the content of each part of a form, taken apart by hand: any library would forgive too much."""
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
        """In pieces that fall into lines, events and letters."""
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
    told = Service()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"service": told}))
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client meant to wait; nobody waits here."""
    asked: list[float] = []
    monkeypatch.setattr(client_module, "sleep", asked.append)
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


def says(status: int, words: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": words}).encode()


# What is asked


def test_streams_are_made_listed_changed_and_forgotten(service: Service, client: Client) -> None:
    assert client.create()["name"] == "made-up"
    assert [s["name"] for s in client.streams()] == ["gate-7", "made-up"]
    assert client.stream("gate-7")["batches"] == 0
    assert client.freeze("gate-7")["frozen"] is True
    assert client.unfreeze("gate-7")["frozen"] is False
    assert client.reset("gate-7")["reset"] == 1
    assert client.rollback("gate-7")["rollback"] == 1
    client.delete("made-up")
    assert list(service.streams) == ["gate-7"]
    assert client.model()["classes"] == CLASSES
    assert client.audit()[0]["what"] == "create"


def test_labels_and_reports(service: Service, client: Client) -> None:
    for seed in range(3):
        client.send("gate-7", random_images(seed=seed))
    assert client.label("gate-7", 1, np.array([0, 2, 1]))["accuracy"] == 50.0
    assert service.labels == {1: [0, 2, 1]}
    assert [r["number"] for r in client.reports("gate-7", last=2)] == [1, 2]
    client.reports("gate-7")
    assert service.requests[-1].query == {"last": ["100"]}


def test_a_service_mounted_below_a_path(service: Service) -> None:
    with Client(service.url + "/behind/proxy/", TOKEN) as client, pytest.raises(ServiceError):
        client.model()
    assert service.requests[-1].path == "/behind/proxy/v1/model"


# Images


@pytest.mark.parametrize("layout", ["last", "first", "strided"])
def test_arrays_arrive_as_they_are(service: Service, client: Client, layout: str) -> None:
    images = random_images()
    images = {"last": images, "first": images.transpose(0, 3, 1, 2), "strided": images[:, ::2]}[layout]
    answer = client.send("gate-7", images)
    assert answer["number"] == 0
    assert len(answer["labels"]) == 3
    np.testing.assert_array_equal(pictures(service.requests[-1]), images)


def test_files_and_bytes_arrive_as_they_are(service: Service, client: Client, tmp_path: Path) -> None:
    images = random_images()
    contents = [png(image) for image in images]
    named = tmp_path / 'a "quoted" ü.png'
    named.write_bytes(contents[0])
    plain = tmp_path / "b.png"
    plain.write_bytes(contents[1])
    client.send("gate-7", [named, str(plain), contents[2]])
    arrived = parts(service.requests[-1])
    assert [content for _, content in arrived] == contents
    assert all('form-data; name="images"; filename="' in header for header, _ in arrived)
    np.testing.assert_array_equal(pictures(service.requests[-1]), images)


@pytest.mark.parametrize(
    "images",
    [
        random_images().astype(np.float32),
        random_images()[0],
        random_images()[..., :2],
        random_images()[:0],
        np.array([[[[{}]]]], dtype=object),
        [],
    ],
)
def test_what_is_no_batch_is_refused_here(service: Service, client: Client, images: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*expected"):
        client.send("gate-7", images)
    assert not service.requests


@pytest.mark.parametrize("images", ["cat.png", b"\x89PNG", Path("cat.png"), [random_images()[0]]])
def test_one_image_is_not_a_sequence(service: Service, client: Client, images: Any) -> None:
    with pytest.raises(TypeError, match=r"got .*expected"):
        client.send("gate-7", images)
    assert not service.requests


# Retries


@pytest.mark.parametrize("fault", ["drop", "lose", *(says(s, "not now") for s in (429, 502, 503, 504))])
@pytest.mark.parametrize("form", ["array", "files"])
def test_a_batch_is_sent_again_and_applied_once(
    service: Service, client: Client, waits: list[float], fault: Any, form: str
) -> None:
    images = random_images()
    service.faults = [fault, fault]
    answer = client.send("gate-7", images if form == "array" else [png(image) for image in images])
    assert answer["number"] == 0
    assert service.streams["gate-7"]["batches"] == 1
    sent = service.asked("POST", "/batches")
    assert len(sent) == 3
    assert len({r.key for r in sent}) == 1
    assert re.fullmatch("[0-9a-f]{32}", sent[0].key)
    for request in sent:
        np.testing.assert_array_equal(pictures(request), images)
    assert 0.125 <= waits[0] <= 0.25
    assert 0.25 <= waits[1] <= 0.5


def test_every_batch_has_a_key_of_its_own_unless_given(service: Service, client: Client) -> None:
    for key in (None, None, "mine:1", "mine:1"):
        client.send("gate-7", random_images(), key=key)
    keys = [r.key for r in service.asked("POST", "/batches")]
    assert keys[0] != keys[1]
    assert keys[2:] == ["mine:1", "mine:1"]
    assert service.streams["gate-7"]["batches"] == 3


@pytest.mark.parametrize("key", ["", "x" * 129, "two\nlines", "ü", "a blank"])
def test_a_key_that_is_none(client: Client, key: str) -> None:
    with pytest.raises(ValueError, match="128 printable"):
        client.send("gate-7", random_images(), key=key)


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("3", 3, 3.25),
        ("0", 0, 0.25),
        ("86400", 30, 30.25),
        ("-5", 0, 0.25),
        ("nan", 0, 0.25),
        ("soon", 0, 0.25),
        (email.utils.formatdate(time.time() + 3600, usegmt=True), 30, 30.25),
        (email.utils.formatdate(time.time() - 3600, usegmt=True), 0, 0.25),
    ],
    ids=["3 s", "0 s", "a day", "negative", "nan", "a word", "in an hour", "an hour ago"],  # the same in every process
)
def test_retry_after_is_honoured_within_bounds(
    service: Service, client: Client, waits: list[float], value: str, least: float, most: float
) -> None:
    service.faults = [says(429, "too much at once", Retry_After=value)]
    client.send("gate-7", random_images())
    assert len(waits) == 1
    assert least <= waits[0] <= most


def test_retries_end(service: Service, waits: list[float]) -> None:
    service.faults = [says(429, "the queue is full", Retry_After="1")] * 9
    with Client(service.url, retries=2) as client, pytest.raises(ServiceError, match="the queue is full") as caught:
        client.model()
    assert caught.value.status == 429
    assert (len(service.requests), len(waits)) == (3, 2)


@pytest.mark.parametrize("what", ["create", "delete", "rollback"])
def test_what_must_not_be_done_twice_is_not_asked_twice(
    service: Service, client: Client, waits: list[float], what: str
) -> None:
    service.faults = ["lose"]
    with pytest.raises(ServiceError, match="may have been done or not") as caught:
        getattr(client, what)("gate-7")
    assert caught.value.status == 0
    service.faults = [says(504, "the gateway gave up")]
    with pytest.raises(ServiceError, match="the gateway gave up"):
        getattr(client, what)("gate-7")
    assert not waits
    client.create("gate-7")
    service.faults = [says(503, "not ready")]  # nothing was done, so it may be asked again
    getattr(client, what)("gate-7")
    assert len(waits) == 1


# Errors


def test_errors_are_in_the_servers_words(service: Service, client: Client) -> None:
    with pytest.raises(ServiceError) as caught:
        client.stream("nowhere")
    assert (caught.value.status, caught.value.message) == (
        404,
        "there is no stream nowhere; create it with POST /v1/streams",
    )
    assert str(caught.value).endswith("(HTTP 404)")
    assert isinstance(caught.value, RuntimeError)
    assert len(service.requests) == 1
    service.faults = [says(409, "this key came with other images")]
    with pytest.raises(ServiceError, match="other images"):
        client.send("gate-7", random_images())


def test_an_error_can_be_copied_as_process_pools_do() -> None:
    error = copy.copy(ServiceError(429, "later"))
    assert (error.status, error.message) == (429, "later")


@pytest.mark.parametrize(
    "fault",
    [
        (200, {}, b"<html>welcome</html>"),
        (200, {}, b"[1, 2]"),
        (200, {}, b"{}"),
        (401, {}, b"<html>who are you</html>"),
        (500, {}, b"[]"),
        (307, {"Location": "http://127.0.0.1:9/elsewhere"}, b""),
    ],
)
def test_something_else_listens_there(service: Service, client: Client, fault: Any) -> None:
    service.faults = [fault]
    with pytest.raises(ServiceError, match="not in the words of the API") as caught:
        client.streams()
    assert caught.value.status == fault[0]
    assert len(service.requests) == 1


def test_nobody_listens(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", TOKEN) as client, pytest.raises(ServiceError) as caught:
        client.create("gate-7")
    assert caught.value.status == 0
    assert f"cannot connect to http://127.0.0.1:{port}" in str(caught.value)
    assert "safer serve" in str(caught.value)
    assert len(waits) == 5


def test_a_server_that_never_answers(service: Service) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    client = Client(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.05, retries=0)
    with deaf, client, pytest.raises(ServiceError, match=r"ReadTimeout.*raise the timeout of 0\.05 s") as caught:
        client.send("gate-7", random_images())
    assert caught.value.status == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a/../b", "a?b", "a b", "x" * 65])
def test_a_name_that_leads_elsewhere_is_not_sent(service: Service, client: Client, name: str) -> None:
    with pytest.raises(ValueError, match="stream name"):
        client.delete(name)
    assert not service.requests


def test_the_token_is_sent_and_never_shown(service: Service) -> None:
    service.faults = [says(401, "wrong token"), "drop"]
    with Client(service.url, TOKEN + "\n", retries=0) as client:
        shown = [repr(client), str(client), repr(vars(client))]
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                client.model()
            shown += [repr(caught.value), str(caught.value), repr(caught.value.__cause__)]
    assert service.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert not [text for text in shown if TOKEN in text]
    with Client(service.url) as client:
        client.model()
    assert "authorization" not in service.requests[-1].headers


@pytest.mark.parametrize("token", ["", "two words", "s3cret\r\nX-Evil: 1", "s3crét"])
def test_a_token_that_is_none_is_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match="got a token") as caught:
        Client("http://127.0.0.1:1", token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8017", "ftp://host", "http://", "http://host:port", "http://u:hidden@host", "http://h?t=hidden"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port") as caught:
        Client(url)
    assert "hidden" not in str(caught.value)


def test_options_that_are_none() -> None:
    for options in ({"timeout": 0}, {"timeout": float("nan")}, {"retries": -1}):
        with pytest.raises(ValueError, match="expected"):
            Client("http://127.0.0.1:1", **options)


def test_without_httpx_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None\nfrom safer_tta.client import Client\nClient('http://127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ImportError: the client needs httpx: pip install 'safer-tta[serve]'"


# The feed


def test_the_feed_is_read_as_the_standard_says(service: Service, client: Client) -> None:
    reports = list(client.follow("gate-7"))
    assert reports == [{"number": 0, "alarm": ""}, {"number": 1, "views": ["a\u2028b → c"]}]
    assert service.requests[-1].headers["accept"] == "text/event-stream"
    assert service.requests[-1].headers["authorization"] == f"Bearer {TOKEN}"


def test_the_feed_is_open_before_it_is_read_and_can_be_left(service: Service, client: Client) -> None:
    service.faults = [says(503, "starting")]
    feed = client.follow("gate-7")
    assert len(service.asked("GET", "/reports")) == 2
    assert next(feed)["number"] == 0
    feed.close()
    assert client.stream("gate-7")["name"] == "gate-7"


def test_a_feed_that_is_none(service: Service, client: Client) -> None:
    with pytest.raises(ServiceError, match="no stream nowhere") as caught:
        client.follow("nowhere")
    assert caught.value.status == 404
    service.faults = [(200, {}, b"{}")]
    with pytest.raises(ServiceError, match="not in the words of the API"):
        client.follow("gate-7")
    service.feed = b"event: report\ndata: {broken\n\n"
    with pytest.raises(ServiceError, match="not in the words of the API"):
        list(client.follow("gate-7"))


def test_a_feed_that_breaks(service: Service, client: Client) -> None:
    short = b'event: report\ndata: {"number": 0}\n\n'
    service.faults = [(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}, b"ffff\r\n" + short)]
    service.faults[0][1]["Connection"] = "close"
    feed = client.follow("gate-7")
    with pytest.raises(ServiceError, match="broke") as caught:
        list(feed)
    assert caught.value.status == 0


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images of two classes in three kinds of files, and things that are no images."""
    root = tmp_path / "photos"
    names = ["dog/b.png", "dog/a.JPG", "cat/2.webp", "cat/1.png", "cat/more/cat/3.jpeg"]
    for name, image in zip(names, random_images(5), strict=True):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, "PNG")
    (root / "notes.txt").write_text("no image")
    (root / "cat" / "._1.png").write_bytes(b"what a Mac leaves beside an image")
    return root


SORTED = ["cat/1.png", "cat/2.webp", "cat/more/cat/3.jpeg", "dog/a.JPG", "dog/b.png"]


def test_a_folder_is_sent_whole_and_in_order(service: Service, client: Client, folder: Path) -> None:
    ticks: list[tuple[int, int]] = []
    result = send_folder(client, folder, "new", batch=2, tick=lambda done, total: ticks.append((done, total)))
    assert result == {
        "images": 5,
        "batches": 3,
        "answered": {"cat": 3, "dog": 2},
        "accuracy": None,
        "abstained": 3,
    }
    assert ticks == [(2, 5), (4, 5), (5, 5)]
    sent = [content for request in service.asked("POST", "/batches") for _, content in parts(request)]
    assert sent == [(folder / name).read_bytes() for name in SORTED]
    assert not service.labels
    assert len(service.asked("POST", "/streams")) == 1
    send_folder(client, folder, "gate-7")
    assert len(service.asked("POST", "/streams")) == 1  # it was there


def test_labels_are_the_names_of_folders(service: Service, client: Client, folder: Path) -> None:
    result = send_folder(client, folder, "gate-7", batch=2, labelled=True)
    true = {(folder / name).read_bytes(): int(name.startswith("dog")) for name in SORTED}
    sent = [[true[content] for _, content in parts(request)] for request in service.asked("POST", "/batches")]
    assert [
        service.labels[number] for number in range(3)
    ] == sent  # mixed: in order it would be one class after another
    answered = [[0, 1], [0, 1], [0]]  # by the server, whatever it is sent
    right = sum(a == b for one, other in zip(answered, sent, strict=True) for a, b in zip(one, other, strict=True))
    assert result["accuracy"] == 20.0 * right
    service.classes = [7, 8]
    (folder / "dog").rename(folder / "7")
    (folder / "cat" / "more" / "cat").rename(folder / "8")
    (folder / "cat").rename(folder.parent / "aside")
    send_folder(client, folder, "numbers", labelled=True)
    assert sorted(service.labels[0]) == [0, 0, 1]


def test_images_in_the_folder_itself_have_its_name(
    service: Service, client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "dog")
    send_folder(client, ".", "gate-7", labelled=True)
    assert service.labels == {0: [1, 1]}


@pytest.mark.parametrize("how", ["killed", "lost"])
def test_a_folder_sent_again_is_applied_once(service: Service, client: Client, folder: Path, how: str) -> None:
    def stop(done: int, total: int) -> None:
        if how == "killed" and done == 4:
            raise KeyboardInterrupt

    impatient = Client(service.url, TOKEN, retries=0)
    if how == "lost":  # look for the stream, first batch, and the second's answer is lost
        service.faults = [None, None, "lose"]
    with impatient, pytest.raises((KeyboardInterrupt, ServiceError)):
        send_folder(impatient, folder, "gate-7", batch=2, tick=stop)
    assert service.streams["gate-7"]["batches"] == 2
    before = [r.key for r in service.asked("POST", "/batches")]
    service.requests.clear()
    assert send_folder(client, folder, "gate-7", batch=2)["batches"] == 3
    keys = [r.key for r in service.asked("POST", "/batches")]
    assert service.streams["gate-7"]["batches"] == 3
    assert keys[:2] == before
    assert len(set(keys)) == 3


def test_keys_follow_the_stream_the_names_and_the_contents(service: Service, client: Client, folder: Path) -> None:
    def keys(stream: str = "gate-7", at: Path = folder) -> list[str]:
        service.requests.clear()
        send_folder(client, at, stream, batch=4)
        return [r.key for r in service.asked("POST", "/batches")]

    first = keys()
    assert keys(at=folder.rename(folder.parent / "moved")) == first  # where the folder lies does not matter
    folder = folder.parent / "moved"
    assert not set(keys("other", folder)) & set(first)
    (folder / "dog" / "b.png").write_bytes(png(random_images(1, seed=9)[0]))
    second = keys(at=folder)
    assert second[0] == first[0]
    assert second[1] != first[1]
    (folder / "dog" / "b.png").rename(folder / "dog" / "c.png")
    assert keys(at=folder)[1] not in {first[1], second[1]}


def test_folders_that_cannot_be_sent(service: Service, client: Client, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no images; expected files ending in \.jpeg, \.jpg, \.png, \.webp"):
        send_folder(client, tmp_path / "empty", "gate-7")
    with pytest.raises(ValueError, match="not a folder"):
        send_folder(client, tmp_path / "nowhere", "gate-7")
    with pytest.raises(ValueError, match="batch of 0"):
        send_folder(client, folder, "gate-7", batch=0)
    (folder / "dog").rename(folder / "wolf")
    with pytest.raises(ValueError, match=r"named wolf; expected the model's classes: cat, dog, horse\. Rename"):
        send_folder(client, folder, "fresh", labelled=True)
    assert list(service.streams) == ["gate-7"]  # nothing was made or sent
    assert not service.asked("POST", "/batches")


def test_a_refused_batch_is_named(service: Service, client: Client, folder: Path) -> None:
    service.faults = [None, None, says(422, "image 1 cannot be decoded")]
    with pytest.raises(ServiceError, match=r"image 1 cannot be decoded. Image 0 of this batch is .*3\.jpeg") as caught:
        send_folder(client, folder, "gate-7", batch=2)
    assert caught.value.status == 422


def test_only_a_missing_stream_is_created(service: Service, client: Client, folder: Path) -> None:
    service.faults = [says(403, "this token may not read")]
    with pytest.raises(ServiceError, match="may not read"):
        send_folder(client, folder, "fresh")
    assert not service.asked("POST", "/streams")
