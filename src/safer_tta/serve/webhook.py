"""A webhook: alarms that are raised or cleared go to an address of the operator, from a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import re
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..errors import InvalidValueError
from .metrics import Metrics

log = logging.getLogger("safer_tta.serve")

WAITING = 1000  # messages that may wait; further ones are not sent
TRIES = 5
FIRST_WAIT = 1.0  # seconds before the second try, doubled with every further one
DEADLINE = 10.0  # seconds of one try, however slowly the other side answers
LAST_TRY = 2.0  # seconds that a stop waits for messages that are left
VARIABLE = "SAFER_WEBHOOK_SECRET"
SECRET = re.compile(r"[\x21-\x7e]{16,}")
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """Where alarms are sent, and the secret that signs them, if there is one.

    Raises:
        InvalidValueError: If the address is none of http or https, or the secret is too short.
    """

    url: str
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise InvalidValueError(f"webhook is {self.url!r}; expected an address such as https://example.org/alarms")
        if parts.username is not None or parts.password is not None:
            raise InvalidValueError("the webhook's address contains a user or password; use a secret instead")
        if self.secret is not None and not SECRET.fullmatch(self.secret):
            raise InvalidValueError("the webhook's secret is invalid; expected at least 16 characters without spaces")

    @classmethod
    def read(cls, url: str, secret_file: Path | None) -> Webhook:
        """Return the webhook with its secret: the content of a file, or of the environment variable."""
        if secret_file is None:
            return cls(url=url, secret=os.environ.get(VARIABLE))
        try:
            return cls(url=url, secret=secret_file.read_text().strip())
        except (OSError, ValueError) as error:
            raise InvalidValueError(f"{secret_file} cannot be used as the webhook's secret: {error}") from error

    def headers(self, body: bytes, now: float, delivery: str) -> dict[str, str]:
        """Return the headers of a message. The signature covers time and body, so an old message cannot be replayed."""
        moment = str(int(now))
        headers = {"Content-Type": "application/json", "X-Safer-Delivery": delivery, "X-Safer-Timestamp": moment}
        if self.secret is not None:
            signed = hmac.new(self.secret.encode(), moment.encode() + b"." + body, hashlib.sha256).hexdigest()
            headers["X-Safer-Signature"] = f"sha256={signed}"
        return headers


class Sender:
    """Sends messages in their order. It never delays who gives them, and never raises."""

    def __init__(self, webhook: Webhook, metrics: Metrics, first_wait: float = FIRST_WAIT) -> None:
        self.webhook, self._metrics, self._first_wait = webhook, metrics, first_wait
        self._messages: queue.Queue[Message | None] = queue.Queue(WAITING)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safer-tta webhook", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message. If too many wait already, it is counted as failed and logged."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._fail(message, f"{WAITING} messages are waiting already")

    def stop(self) -> None:
        """Try once to send what is left, as long as a stop may take."""
        self._stopped.set()
        with contextlib.suppress(queue.Full):  # then it does not end by itself
            self._messages.put_nowait(None)
        self._thread.join(LAST_TRY)
        if self._thread.is_alive():
            log.warning("the service stops before the webhook was told of all alarms")
            with contextlib.suppress(queue.Empty):
                while True:
                    self._messages.get_nowait()
            self._messages.put(None)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._deliver(message)
            except Exception as error:  # whatever it is, the next message may be sent
                self._fail(message, repr(error))

    def _deliver(self, message: Message) -> None:
        """Try until the other side has taken the message, or it is hopeless."""
        body, delivery = json.dumps(message).encode(), str(uuid.uuid4())
        for number in range(TRIES):
            if number and self._stopped.wait(self._first_wait * 2 ** (number - 1)):
                break
            problem, hopeless = self._try(body, delivery)
            if not problem:
                self._metrics.webhook.labels("sent").inc()
                return
            log.info("the webhook did not take a message: %s", problem)
            if hopeless:
                break
        self._fail(message, problem)

    def _try(self, body: bytes, delivery: str) -> tuple[str, bool]:
        """Send once; return what went wrong, if anything did, and whether to try again would be in vain."""
        try:
            status = asyncio.run(asyncio.wait_for(self._post(body, delivery), DEADLINE))
        except TimeoutError:
            return f"no answer within {DEADLINE:g} s", False
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return f"{type(error).__name__}: {error}", False
        if 200 <= status < 300:
            return "", False
        return f"the answer was {status}", 300 <= status < 500 and status not in (408, 425, 429)

    async def _post(self, body: bytes, delivery: str) -> int:
        """Return the status of the answer; its body is not read, and a redirect is not followed."""
        headers = self.webhook.headers(body, time.time(), delivery)
        async with (
            httpx.AsyncClient(timeout=DEADLINE, follow_redirects=False) as client,
            client.stream("POST", self.webhook.url, content=body, headers=headers) as answer,
        ):
            return answer.status_code

    def _fail(self, message: Message, problem: str) -> None:
        self._metrics.webhook.labels("failed").inc()
        told = f"{message['event']} {message['alarm']['kind']} of stream {message['owner']}/{message['stream']}"
        log.warning("the webhook was not told of an alarm (%s): %s", told, problem)
