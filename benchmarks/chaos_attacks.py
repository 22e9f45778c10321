"""What a hostile owner and clients without a token do to the service of benchmarks/chaos.py.

`python benchmarks/chaos_attacks.py NAME PORT TOKEN` attacks until its standard input closes, and then prints what it
was answered. It is a process of its own, so that it shares no interpreter with the client that is measured.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import resource
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import httpx
import numpy as np
from PIL import Image

BODY = 64 * 2**20  # what a body may have
PAUSE = 0.1  # seconds after a refusal; the sender does not heed Retry-After
STREAMS = [f"load-{number}" for number in range(4)]


class Site:
    """Where the service is, and what it has answered."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token
        self.host, self.stop = f"127.0.0.1:{port}", threading.Event()
        self._answers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, answer: object) -> None:
        with self._lock:
            self._answers[str(answer)] += 1

    def told(self) -> dict[str, int]:
        with self._lock:
            return dict(self._answers)

    def http(self) -> httpx.Client:
        """Return a client that threads may share and that notes every answer."""
        return httpx.Client(
            base_url=f"http://{self.host}", headers={"Authorization": f"Bearer {self.token}"}, timeout=60,
            limits=httpx.Limits(max_connections=None), verify=False, trust_env=False,
            event_hooks={"response": [lambda response: self.note(response.status_code)]},
        )  # fmt: skip

    def head(self, length: int, *, token: str | None = None) -> bytes:
        """Return the head of a batch of this length."""
        lines = [
            f"POST /v1/streams/{STREAMS[0]}/batches HTTP/1.1", f"Host: {self.host}",
            f"Authorization: Bearer {token or self.token}", "Content-Type: application/x-npy",
            f"Content-Length: {length}",
        ]  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode()

    def ask(self, request: bytes) -> None:
        """Send a request as it stands, and note the status of its answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(request)
                self.note_head(connection.recv(4096))
        except OSError as error:
            self.note(type(error).__name__)

    def note_head(self, answer: bytes) -> None:
        self.note(answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "closed")


def together(site: Site, count: int, work: Callable[[Site], None]) -> None:
    """Do some work in threads until the site is left alone."""

    def repeat() -> None:
        while not site.stop.is_set():
            try:
                work(site)
            except (httpx.HTTPError, OSError) as error:
                site.note(type(error).__name__)
                site.stop.wait(PAUSE)

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    site.stop.wait()
    for thread in threads:
        thread.join(0.2)


def hold(site: Site, count: int, opening: bytes, drip: bytes = b"") -> None:
    """Keep this many connections open that have sent an opening, and send them a little more every second."""
    held: list[socket.socket] = []
    while not site.stop.is_set():
        held = [one for one in held if _still_open(site, one, drip)]
        with contextlib.suppress(OSError):
            while len(held) < count and not site.stop.is_set():
                one = socket.create_connection(("127.0.0.1", site.port), timeout=5)
                try:
                    one.sendall(opening)
                except OSError as error:  # it was refused before it was complete
                    site.note(type(error).__name__)
                    one.close()
                    break
                one.setblocking(False)
                held.append(one)
        site.stop.wait(1.0)


def _still_open(site: Site, one: socket.socket, drip: bytes) -> bool:
    try:
        one.send(drip)
        site.note_head(one.recv(4096))
    except BlockingIOError:
        return True
    except OSError as error:
        site.note(type(error).__name__)
    one.close()
    return False


def npy(images: int, side: int = 64) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(256, size=(images, side, side, 3), dtype=np.uint8))
    return file.getvalue()


def send(site: Site, http: httpx.Client, names: Sequence[str], content: bytes) -> None:
    """Send a batch to one of these streams, which is created if it is missing."""
    name = names[uuid.uuid4().int % len(names)]
    headers = {"Content-Type": "application/x-npy", "Idempotency-Key": uuid.uuid4().hex}
    status = http.post(f"/v1/streams/{name}/batches", content=content, headers=headers).status_code
    if status == 404:
        http.post("/v1/streams", json={"name": name})
    elif status != 200:
        site.stop.wait(PAUSE)


def flood(site: Site) -> None:
    """Send batches of 16 images to four streams from 32 connections at once, without heeding refusals."""
    with site.http() as http:
        together(site, 32, functools.partial(send, http=http, names=STREAMS, content=npy(16)))


def load(site: Site) -> None:
    """Send small batches to two streams from two connections."""
    with site.http() as http:
        together(site, 2, functools.partial(send, http=http, names=STREAMS[:2], content=npy(2)))


def stalled_uploads(site: Site) -> None:
    """Send all but 16 bytes of eight bodies of 64 MB, and wait."""
    with site.http() as http:
        http.post("/v1/streams", json={"name": STREAMS[0]})
    opening = site.head(BODY) + bytes(BODY - 16)
    together(site, 8, functools.partial(hold, count=1, opening=opening))


def slow_uploads(site: Site) -> None:
    """Send 64 bodies at a kilobyte per second."""
    with site.http() as http:
        http.post("/v1/streams", json={"name": STREAMS[0]})
    hold(site, 64, site.head(BODY), drip=bytes(1024))


def decode_bombs(site: Site) -> None:
    """Send batches of 16 black images of 16 megapixels, which are small files, from eight connections."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 3999)).save(file, "PNG")
    files = [("images", (f"{number}.png", file.getvalue())) for number in range(16)]

    def bomb(site: Site, http: httpx.Client) -> None:
        if http.post(f"/v1/streams/{STREAMS[0]}/batches", files=files).status_code != 200:
            site.stop.wait(PAUSE)

    with site.http() as http:
        http.post("/v1/streams", json={"name": STREAMS[0]})
        together(site, 8, functools.partial(bomb, http=http))


def idle_connections(site: Site) -> None:
    """Keep 2,100 connections open that send nothing."""
    hold(site, 2100, b"")


def half_headers(site: Site) -> None:
    """Keep 500 connections open that have sent half a header."""
    hold(site, 500, b"POST /v1/streams/x/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")


def malformed(site: Site) -> None:
    """Send 100 wrong tokens a second, and hosts, origins and paths that cannot be parsed."""
    lines = (
        "Host: [::1", f"Host: {site.host}\r\nOrigin: http://[", f"Host: {site.host}\r\nContent-Length: -1",
        f"Host: {site.host}\r\nAuthorization: Bearer \x00\xff", "Host: \xe9\xff", f"Host: {site.host}:99999",
    )  # fmt: skip
    requests = [f"GET /v1/model HTTP/1.1\r\n{line}\r\n\r\n".encode("latin1") for line in lines]
    requests += [
        b"\x16\x03\x01\x02\x00 not HTTP\r\n\r\n",
        b"GET /v1/streams/..%2f..%2fmetrics HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    turns = itertools.cycle(requests)

    def knock(site: Site) -> None:
        site.ask(site.head(0, token=uuid.uuid4().hex))
        site.stop.wait(0.04)

    def garble(site: Site) -> None:
        site.ask(next(turns))
        site.stop.wait(0.05)

    threading.Thread(target=together, args=(site, 4, knock), daemon=True).start()
    together(site, 1, garble)


ATTACKS: dict[str, Callable[[Site], None]] = {
    work.__name__: work
    for work in (
        flood, load, stalled_uploads, slow_uploads, decode_bombs, idle_connections, half_headers, malformed,
    )
}  # fmt: skip


def main() -> None:
    name, port, token = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    site = Site(int(port), token)
    attack = threading.Thread(target=ATTACKS[name], args=(site,), daemon=True)
    attack.start()
    sys.stdin.read()
    site.stop.set()
    attack.join(10)
    print(json.dumps(site.told()), flush=True)
    os._exit(0)  # without waiting for what still waits for an answer


if __name__ == "__main__":
    main()
