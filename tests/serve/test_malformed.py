"""Malformed requests: each is told what was expected, and nothing is learnt from it."""

from __future__ import annotations

import io
import socket

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.serve.helpers import NPY, SIDE, array_file, client, image_file

GOOD = np.zeros((2, SIDE, SIDE, 3), np.uint8)


def bomb() -> bytes:
    """Return a picture of 25 megapixels in a few kilobytes; Pillow itself refuses larger ones."""
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    return file.getvalue()


def claiming(shape: object, size: int = 100) -> bytes:
    """Return an array file whose header says more than it holds."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * size


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    return file.getvalue()


def multipart(*parts: tuple[str, str, bytes]) -> dict:
    return {"files": [(name, (filename, content)) for name, filename, content in parts]}


BATCHES = "/v1/streams/bad/batches"
FORM = "multipart/form-data; boundary=b"


def npy(content: bytes) -> dict:
    return {"content": content, "headers": NPY}


def typed(content: bytes, kind: str) -> dict:
    return {"content": content, "headers": {"Content-Type": kind}}


def keyed(key: str) -> dict:
    return {"content": array_file(GOOD), "headers": {**NPY, "Idempotency-Key": key}}


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
    "npy: version 9": ("post", BATCHES, npy(b"\x93NUMPY\x09\x00" + b"\0" * 50)),
    "npy: version 3": ("post", BATCHES, npy(b"\x93NUMPY\x03\x00" + b"\0" * 50)),
    "npy: header cut": ("post", BATCHES, npy(array_file(GOOD)[:40])),
    "npy: pixels cut": ("post", BATCHES, npy(array_file(GOOD)[:-1])),
    "npy: pixels left over": ("post", BATCHES, npy(array_file(GOOD) + b"x")),
    "npy: pickle": ("post", BATCHES, npy(pickled())),
    "npy: floats": ("post", BATCHES, npy(array_file(GOOD.astype(np.float32)))),
    "npy: int64": ("post", BATCHES, npy(array_file(GOOD.astype(np.int64)))),
    "npy: bool": ("post", BATCHES, npy(array_file(GOOD.astype(bool)))),
    "npy: text array": ("post", BATCHES, npy(array_file(np.array(["a"])))),
    "npy: scalar": ("post", BATCHES, npy(array_file(np.array(3, np.uint8)))),
    "npy: one image": ("post", BATCHES, npy(array_file(GOOD[0]))),
    "npy: five dimensions": ("post", BATCHES, npy(array_file(GOOD[None]))),
    "npy: no images": ("post", BATCHES, npy(array_file(GOOD[:0]))),
    "npy: grey": ("post", BATCHES, npy(array_file(GOOD[..., :1]))),
    "npy: four channels": ("post", BATCHES, npy(array_file(np.repeat(GOOD, 4, 3)[..., :4]))),
    "npy: another side": ("post", BATCHES, npy(array_file(np.zeros((2, 32, 32, 3), np.uint8)))),
    "npy: not square": ("post", BATCHES, npy(array_file(np.zeros((2, SIDE, 32, 3), np.uint8)))),
    "npy: too many": ("post", BATCHES, npy(claiming((100_000, SIDE, SIDE, 3)))),
    "npy: more than memory": ("post", BATCHES, npy(claiming((2**40, SIDE, SIDE, 3)))),
    "npy: a side of 8000 digits": ("post", BATCHES, npy(claiming((int("9" * 4000), SIDE, SIDE, 3)))),
    "npy: a truth for a side": ("post", BATCHES, npy(claiming((True, SIDE, SIDE, 3)))),
    "npy: negative": ("post", BATCHES, npy(claiming((-1, SIDE, SIDE, 3)))),
    "npy: sides that overflow": ("post", BATCHES, npy(claiming((1, 2**33, 2**33, 3)))),
    "npy: header that is code": ("post", BATCHES, npy(b"\x93NUMPY\x01\x00\x20\x00__import__('os').getcwd()       \n")),
    "form: no boundary": ("post", BATCHES, typed(b"x", "multipart/form-data")),
    "form: wrong boundary": ("post", BATCHES, typed(b"--a\r\n\r\nx\r\n--a--", FORM)),
    "form: cut": ("post", BATCHES, typed(b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\nxx', FORM)),
    "form: no disposition": ("post", BATCHES, typed(b"--b\r\nX: y\r\n\r\nx\r\n--b--\r\n", FORM)),
    "form: other names": ("post", BATCHES, multipart(("pictures", "a.png", image_file()))),
    "form: text for an image": ("post", BATCHES, {"data": {"images": "hello"}, "files": [("x", ("a.png", b""))]}),
    "form: empty file": ("post", BATCHES, multipart(("images", "a.png", b""))),
    "form: not an image": ("post", BATCHES, multipart(("images", "a.png", b"hello"))),
    "form: cut png": ("post", BATCHES, multipart(("images", "a.png", image_file()[:200]))),
    "form: cut jpeg": ("post", BATCHES, multipart(("images", "a.jpg", image_file(kind="JPEG")[:300]))),
    "form: gif": ("post", BATCHES, multipart(("images", "a.gif", image_file(kind="GIF")))),
    "form: bmp": ("post", BATCHES, multipart(("images", "a.bmp", image_file(kind="BMP")))),
    "form: tiff": ("post", BATCHES, multipart(("images", "a.tif", image_file(kind="TIFF")))),
    "form: svg": ("post", BATCHES, multipart(("images", "a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>"))),
    "form: pdf": ("post", BATCHES, multipart(("images", "a.pdf", image_file(kind="PDF")))),
    "form: decompression bomb": ("post", BATCHES, multipart(("images", "a.png", bomb()))),
    "form: one good, one bad": ("post", BATCHES, multipart(("images", "a", image_file()), ("images", "b", b"x"))),
    "form: too many": ("post", BATCHES, multipart(*[("images", "a.png", b"x")] * 300)),
    "form: too many fields": (
        "post", BATCHES, {"data": {f"f{n}": "x" for n in range(50)}, "files": [("images", ("a.png", b"x"))]},
    ),
    "key: empty": ("post", BATCHES, keyed("")),
    "key: too long": ("post", BATCHES, keyed("k" * 129)),
    "key: spaces": ("post", BATCHES, keyed("a b")),
    "key: a tab": ("post", BATCHES, keyed("a\tb")),
    "batch: of no stream": ("post", "/v1/streams/none/batches", npy(array_file(GOOD))),
    "batches: last 0": ("get", BATCHES + "?last=0", {}),
    "batches: last 1000": ("get", BATCHES + "?last=1000", {}),
    "batches: last x": ("get", BATCHES + "?last=x", {}),
    "create: a list": ("post", "/v1/streams", {"json": []}),
    "create: a number": ("post", "/v1/streams", {"json": {"name": 5}}),
    "create: unknown field": ("post", "/v1/streams", {"json": {"nome": "a"}}),
    "create: empty name": ("post", "/v1/streams", {"json": {"name": ""}}),
    "create: long name": ("post", "/v1/streams", {"json": {"name": "a" * 65}}),
    "create: a path": ("post", "/v1/streams", {"json": {"name": "../../etc"}}),
    "create: a dot": ("post", "/v1/streams", {"json": {"name": "."}}),
    "create: a slash": ("post", "/v1/streams", {"json": {"name": "a/b"}}),
    "create: a newline": ("post", "/v1/streams", {"json": {"name": "a\n"}}),
    "create: null byte": ("post", "/v1/streams", {"json": {"name": "a\0b"}}),
    "create: not json": ("post", "/v1/streams", typed(b"{", "application/json")),
    "create: not utf-8": ("post", "/v1/streams", typed(b'{"name": "\xff"}', "application/json")),
    "create: deep json": ("post", "/v1/streams", typed(b"[" * 100_000, "application/json")),
    "create: there already": ("post", "/v1/streams", {"json": {"name": "bad"}}),
    "stream: unknown": ("get", "/v1/streams/none", {}),
    "stream: strange name": ("get", "/v1/streams/%00", {}),
    "stream: sql": ("get", "/v1/streams/a'%20or%20'1'='1", {}),
    "delete: unknown": ("delete", "/v1/streams/none", {}),
    "reset: unknown": ("post", "/v1/streams/none/reset", {}),
    "rollback: unknown": ("post", "/v1/streams/none/rollback", {}),
    "reset: by get": ("get", "/v1/streams/bad/reset", {}),
    "do what": ("post", "/v1/streams/bad/explode", {}),
    "labels: of a batch that is not there": ("put", BATCHES + "/7/labels", {"json": {"labels": [0]}}),
    "labels: of batch 0": ("put", BATCHES + "/0/labels", {"json": {"labels": [0]}}),
    "labels: of batch x": ("put", BATCHES + "/x/labels", {"json": {"labels": [0]}}),
    "labels: of batch 10^30": ("put", BATCHES + f"/{10**30}/labels", {"json": {"labels": [0]}}),
    "labels: none": ("put", BATCHES + "/1/labels", {"json": {"labels": []}}),
    "labels: too few": ("put", BATCHES + "/1/labels", {"json": {"labels": [0]}}),
    "labels: negative": ("put", BATCHES + "/1/labels", {"json": {"labels": [0, -1]}}),
    "labels: no class": ("put", BATCHES + "/1/labels", {"json": {"labels": [0, 7]}}),
    "labels: words": ("put", BATCHES + "/1/labels", {"json": {"labels": ["disc", "ring"]}}),
    "labels: fractions": ("put", BATCHES + "/1/labels", {"json": {"labels": [0.5, 1.0]}}),
    "labels: nothing": ("put", BATCHES + "/1/labels", {}),
    "nowhere": ("get", "/v2/streams", {}),
    "by another verb": ("patch", "/v1/streams", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_stream(server):
    with client(server) as asking:
        asking.create("bad")
        asking.send("bad", GOOD)
    return server


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_refused_with_a_reason(bad_stream, what):
    verb, path, arguments = MALFORMED[what]
    answer = httpx.request(verb, bad_stream.url + path, timeout=60, **arguments)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.json()["error"]) > 8
    assert "Traceback" not in answer.text
    with client(bad_stream) as asking:
        assert asking.stream("bad")["batches"] == 1  # nothing was learnt


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


def test_unfinished_requests_do_not_delay_others(server, asking):
    """Fifty connections never finish their request, and one does."""
    asking.create("patient")
    lines = []
    for _ in range(50):
        line = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/streams/patient/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {NPY['Content-Type']}"
        line.sendall(f"{head}\r\nContent-Length: 1000000\r\n\r\nhalf".encode())
        lines.append(line)
    assert asking.send("patient", GOOD)["number"] == 1
    for line in lines:
        line.close()
