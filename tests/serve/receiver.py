"""A server that takes the messages of a webhook, or treats them badly."""

import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safer_tta.serve.webhook import Webhook

Reply = Callable[[BaseHTTPRequestHandler], int]


class Receiver:
    """What arrived. `reply` gives the status of each answer, and may take its time."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.bodies, self.headers = reply, [], []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    def webhook(self, secret: str | None = None) -> Webhook:
        return Webhook(url=self.url, secret=secret)

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Return what arrived, once so much has."""
        deadline = time.monotonic() + 60
        while len(self.bodies) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return [json.loads(body) for body in self.bodies]

    def verified(self, secret: str) -> bool:
        """Whether everything is signed as docs/operate.md says."""
        return all(
            headers["X-Safer-Signature"]
            == "sha256="
            + hmac.new(secret.encode(), headers["X-Safer-Timestamp"].encode() + b"." + body, hashlib.sha256).hexdigest()
            for headers, body in zip(self.headers, self.bodies, strict=True)
        )

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.headers.append(dict(self.headers))
                receiver.bodies.append(body)
                status = receiver.reply(self)
                with contextlib.suppress(OSError):  # who asked may be gone
                    self.send_response(status)
                    self.send_header("Location", receiver.url + "/elsewhere")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextlib.contextmanager
def receiving(reply: Reply = lambda _: 204) -> Iterator[Receiver]:
    receiver = Receiver(reply)
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
