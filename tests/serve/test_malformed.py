import contextlib
import io
import socket

import httpx
import numpy as np
import pytest
from PIL import Image

from safer_tta.client import Client
from tests.serve.helpers import NPY, SIDE, array_file, image_file

GOOD = np.zeros((2, SIDE, SIDE, 3), np.uint8)


def bomb():
    """Return a picture of 25 megapixels in a few kilobytes; Pillow itself refuses larger ones."""
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    return file.getvalue()


def claiming(shape, size=100):
    """Return an array file whose header says more than it holds."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * size


def multipart(*parts):
    return {"files": [(name, (filename, content)) for name, filename, content in parts]}


STREAMS, BATCHES = "/v1/streams", "/v1/streams/bad/batches"
FORM = "multipart/form-data; boundary=b"


def typed(content, kind, **headers):
    return {"content": content, "headers": {"Content-Type": kind, **headers}}


def npy(content, **headers):
    return typed(content, NPY["Content-Type"], **headers)


def file(name, content):
    return multipart(("images", name, content))


KEYS = ("", "k" * 129, "a b", "a\tb")
NAMES = (5, "", "a" * 65, "../../etc", ".", "a/b", "a\n", "a\0b")
LABELS = ([], [0], [0, -1], [0, 7], ["disc", "ring"], [0.5, 1.0])
MALFORMED = {
    # what: (verb, path, arguments of the request)
    "batch: nothing": ("post", BATCHES, {}),
    "batch: json": ("post", BATCHES, {"json": {"images": []}}),
    "batch: text": ("post", BATCHES, typed(b"hello", "text/plain")),
    "batch: type without a slash": ("post", BATCHES, typed(b"x", "png")),
    "batch: image without multipart": ("post", BATCHES, typed(image_file(), "image/png")),
    "npy: nothing": ("post", BATCHES, npy(b"")),
    "npy: text": ("post", BATCHES, npy(b"hello")),
    "npy: only magic": ("post", BATCHES, npy(b"\x93NUMPY")),
    **{f"npy: version {n}": ("post", BATCHES, npy(b"\x93NUMPY%c\x00" % n + b"\0" * 50)) for n in (3, 9)},
    "npy: header cut": ("post", BATCHES, npy(array_file(GOOD)[:40])),
    "npy: pixels cut": ("post", BATCHES, npy(array_file(GOOD)[:-1])),
    "npy: pixels left over": ("post", BATCHES, npy(array_file(GOOD) + b"x")),
    "npy: pickle": ("post", BATCHES, npy(array_file(np.array([{"a": 1}, None], dtype=object)))),
    **{f"npy: {kind}": ("post", BATCHES, npy(array_file(GOOD.astype(kind)))) for kind in ("float32", "int64", "bool")},
    "npy: text array": ("post", BATCHES, npy(array_file(np.array(["a"])))),
    "npy: scalar": ("post", BATCHES, npy(array_file(np.array(3, np.uint8)))),
    "npy: one image": ("post", BATCHES, npy(array_file(GOOD[0]))),
    "npy: five dimensions": ("post", BATCHES, npy(array_file(GOOD[None]))),
    "npy: no images": ("post", BATCHES, npy(array_file(GOOD[:0]))),
    "npy: grey": ("post", BATCHES, npy(array_file(GOOD[..., :1]))),
    "npy: four channels": ("post", BATCHES, npy(array_file(np.repeat(GOOD, 4, 3)[..., :4]))),
    "npy: another side": ("post", BATCHES, npy(array_file(np.zeros((2, 32, 32, 3), np.uint8)))),
    "npy: not square": ("post", BATCHES, npy(array_file(np.zeros((2, SIDE, 32, 3), np.uint8)))),
    **{f"npy: {n} images": ("post", BATCHES, npy(claiming((n, SIDE, SIDE, 3)))) for n in (10**5, 2**40, True, -1)},
    "npy: a side of 8000 digits": ("post", BATCHES, npy(claiming((int("9" * 4000), SIDE, SIDE, 3)))),
    "npy: sides that overflow": ("post", BATCHES, npy(claiming((1, 2**33, 2**33, 3)))),
    "npy: header that is code": ("post", BATCHES, npy(b"\x93NUMPY\x01\x00\x20\x00__import__('os').getcwd()       \n")),
    "form: no boundary": ("post", BATCHES, typed(b"x", "multipart/form-data")),
    "form: wrong boundary": ("post", BATCHES, typed(b"--a\r\n\r\nx\r\n--a--", FORM)),
    "form: cut": ("post", BATCHES, typed(b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\nxx', FORM)),
    "form: no disposition": ("post", BATCHES, typed(b"--b\r\nX: y\r\n\r\nx\r\n--b--\r\n", FORM)),
    "form: other names": ("post", BATCHES, multipart(("pictures", "a.png", image_file()))),
    "form: text for an image": ("post", BATCHES, {"data": {"images": "hello"}, "files": [("x", ("a.png", b""))]}),
    "form: empty file": ("post", BATCHES, file("a.png", b"")),
    "form: not an image": ("post", BATCHES, file("a.png", b"hello")),
    "form: cut png": ("post", BATCHES, file("a.png", image_file()[:200])),
    "form: cut jpeg": ("post", BATCHES, file("a.jpg", image_file(kind="JPEG")[:300])),
    **{f"form: {k}": ("post", BATCHES, file(f"a.{k}", image_file(kind=k))) for k in ("gif", "bmp", "tiff", "pdf")},
    "form: svg": ("post", BATCHES, file("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>")),
    "form: decompression bomb": ("post", BATCHES, file("a.png", bomb())),
    "form: one good, one bad": ("post", BATCHES, multipart(("images", "a", image_file()), ("images", "b", b"x"))),
    "form: too many": ("post", BATCHES, multipart(*[("images", "a.png", b"x")] * 300)),
    "form: too many fields": (
        "post", BATCHES, {"data": {f"f{n}": "x" for n in range(50)}, "files": [("images", ("a.png", b"x"))]},
    ),
    **{f"key: {key!r:.9}": ("post", BATCHES, npy(array_file(GOOD), **{"Idempotency-Key": key})) for key in KEYS},
    "batch: of no stream": ("post", STREAMS + "/none/batches", npy(array_file(GOOD))),
    **{f"batches: last {last}": ("get", f"{BATCHES}?last={last}", {}) for last in (0, 1000, "x")},
    "create: a list": ("post", STREAMS, {"json": []}),
    "create: unknown field": ("post", STREAMS, {"json": {"nome": "a"}}),
    **{f"create: {name!r:.9}": ("post", STREAMS, {"json": {"name": name}}) for name in NAMES},
    "create: not json": ("post", STREAMS, typed(b"{", "application/json")),
    "create: not utf-8": ("post", STREAMS, typed(b'{"name": "\xff"}', "application/json")),
    "create: deep json": ("post", STREAMS, typed(b"[" * 100_000, "application/json")),
    "create: there already": ("post", STREAMS, {"json": {"name": "bad"}}),
    "stream: unknown": ("get", "/v1/streams/none", {}),
    "stream: strange name": ("get", "/v1/streams/%00", {}),
    "stream: sql": ("get", "/v1/streams/a'%20or%20'1'='1", {}),
    "delete: unknown": ("delete", "/v1/streams/none", {}),
    "reset: unknown": ("post", "/v1/streams/none/reset", {}),
    "rollback: unknown": ("post", "/v1/streams/none/rollback", {}),
    "reset: by get": ("get", "/v1/streams/bad/reset", {}),
    "do what": ("post", "/v1/streams/bad/explode", {}),
    **{f"labels: of {n}": ("put", f"{BATCHES}/{n}/labels", {"json": {"labels": [0]}}) for n in (7, 0, "x", 10**30)},
    **{f"labels: {labels}": ("put", BATCHES + "/1/labels", {"json": {"labels": labels}}) for labels in LABELS},
    "labels: nothing": ("put", BATCHES + "/1/labels", {}),
    "nowhere": ("get", "/v2/streams", {}),
    "by another verb": ("patch", "/v1/streams", {}),
}  # fmt: skip


@pytest.fixture(scope="session")
def bad_stream(server):
    with Client(server.url) as asking:
        asking.create("bad")
        asking.send("bad", GOOD)
    return server


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_refused_with_a_reason_and_teaches_nothing(bad_stream, asking, what):
    verb, path, arguments = MALFORMED[what]
    answer = httpx.request(verb, bad_stream.url + path, timeout=60, **arguments)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.json()["error"]) > 8
    assert "Traceback" not in answer.text
    assert asking.stream("bad")["batches"] == 1


def test_the_table_of_malformed_requests_is_long():
    assert len(MALFORMED) >= 60


def test_a_body_without_an_end_is_cut_off(bad_stream):
    """It does not say its length, so it is counted as it arrives."""

    def endless():
        for _ in range(200):
            yield b"\0" * 2**20

    address = bad_stream.url + BATCHES
    assert httpx.post(address, content=endless(), headers=NPY, timeout=60).status_code == 413
    with socket.create_connection(("127.0.0.1", bad_stream.port)) as line:  # an impossible length
        line.sendall(f"POST {BATCHES} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    labels = httpx.put(bad_stream.url + BATCHES + "/1/labels", content=b"[" + b"1," * 2**20, headers={})
    assert labels.status_code == 413
    created = httpx.post(bad_stream.url + STREAMS, content=endless(), headers={"Content-Type": "application/json"})
    assert created.status_code == 413
    assert "longer than 65536 bytes" in created.json()["error"]


def test_unfinished_requests_do_not_delay_others(server, asking):
    asking.create("patient")
    head = f"POST /v1/streams/patient/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {NPY['Content-Type']}"
    with contextlib.ExitStack() as lines:
        for _ in range(50):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            line.sendall(f"{head}\r\nContent-Length: 1000000\r\n\r\nhalf".encode())
        assert asking.send("patient", GOOD)["number"] == 1
