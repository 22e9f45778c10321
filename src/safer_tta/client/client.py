"""Talk to a running service (`safer serve`) from Python. See docs/serve.md for the HTTP API.

with Client("http://127.0.0.1:8017", token) as client:
    client.create("gate-7")
    answer = client.send("gate-7", images)     # a uint8 array, or a list of paths or contents of image files
"""

from __future__ import annotations

import contextlib
import email.utils
import io
import json
import os
import random
import re
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidTypeError, InvalidValueError, MissingPackageError, ServiceError

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]
Images = NDArray[np.uint8] | Sequence[str | os.PathLike[str] | bytes]

REFUSED = {429, 503}  # the server did nothing, so any request may be repeated
UNSURE = {502, 504}  # a proxy lost the server's answer, so only requests that may be done twice are repeated
FIRST_WAIT = 0.25  # seconds, doubled with every attempt
LONGEST_WAIT = 30.0
QUIET_FEED = 45.0  # seconds after which a silent feed is dead, as the server writes a comment every 15 s
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the end may be the first half of \r\n


class Client:
    """A connection to one service.

    Its methods raise ServiceError if the service refuses or does not answer.

    Args:
        url: Where the service listens, with the path that it is mounted under, if any.
        token: The token to send. None sends none.
        timeout: Seconds to wait for a connection, and for each piece of an answer.
        retries: How often a request is repeated after a broken connection, a 429, 502, 503 or 504. Requests that must
            not be done twice (create, delete, rollback) are repeated only if the service certainly did not do them.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 5) -> None:
        if retries < 0 or not timeout > 0:
            problem = f"timeout is {timeout} and retries is {retries}"
            raise InvalidValueError(f"{problem}; expected a positive timeout and at least 0 retries")
        self._httpx = _import_httpx()
        self.url, self.timeout, self.retries = _checked_url(self._httpx, url), timeout, retries
        self._http: httpx.Client = self._httpx.Client(
            base_url=self.url,
            headers={"Accept": "application/json"} | _authorization(token),
            timeout=timeout,
            # Less than the 5 s after which servers drop an idle connection, so that no request meets a closing one.
            limits=self._httpx.Limits(keepalive_expiry=2.0),
        )

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # Streams

    def create(self, name: str | None = None) -> Json:
        """Create a stream; the service chooses a name if none is given."""
        content: Json = {} if name is None else {"json": {"name": name}}
        return self._object(self._call("POST", "v1/streams", repeatable=False, **content))

    def streams(self) -> list[Json]:
        """Return all streams of this owner."""
        return self._list(self._call("GET", "v1/streams"), "streams")

    def stream(self, name: str) -> Json:
        """Return one stream."""
        return self._object(self._call("GET", _path(name)))

    def delete(self, name: str) -> None:
        """Delete a stream with its state and its answers."""
        self._call("DELETE", _path(name), repeatable=False)

    def freeze(self, name: str) -> Json:
        """Only predict, until `unfreeze`."""
        return self._object(self._call("POST", _path(name, "freeze")))

    def unfreeze(self, name: str) -> Json:
        """Learn again."""
        return self._object(self._call("POST", _path(name, "unfreeze")))

    def reset(self, name: str) -> Json:
        """Return to the source model."""
        return self._object(self._call("POST", _path(name, "reset")))

    def rollback(self, name: str) -> Json:
        """Return to the last healthy state. Another call returns to the one before it."""
        return self._object(self._call("POST", _path(name, "rollback"), repeatable=False))

    # Batches

    def send(self, name: str, images: Images, *, key: str | None = None) -> Json:
        """Send a batch, which is answered and learnt from.

        Args:
            name: The stream.
            images: A uint8 array (B,H,W,3) or (B,3,H,W) of the model's side, or a sequence of paths or contents of PNG,
                JPEG or WebP files of any size.
            key: The service applies a batch once per key, however often it arrives. Give your own if your process may
                die and send the batch again. By default it is random and covers the retries within this call.
        """
        headers = {"Idempotency-Key": _checked_key(uuid.uuid4().hex if key is None else key)}
        content: Json = {}
        if isinstance(images, np.ndarray):
            headers["Content-Type"] = "application/x-npy"
            content["content"] = _npy(images)
        else:
            content["files"] = _files(images)
        return self._object(self._call("POST", _path(name, "batches"), headers=headers, **content))

    def label(self, name: str, number: int, labels: Iterable[int]) -> Json:
        """Give the true labels of a batch, in the order of its images; return its report with the accuracy."""
        content = {"labels": [int(label) for label in labels]}
        return self._object(self._call("PUT", _path(name, "batches", str(int(number)), "labels"), json=content))

    def reports(self, name: str, last: int = 100) -> list[Json]:
        """Return the reports of the last batches, oldest first; the service keeps 256."""
        return self._list(self._call("GET", _path(name, "batches"), params={"last": last}), "reports")

    def follow(self, name: str) -> Generator[Json, None, None]:
        """Yield reports as batches are answered. The feed is open when this returns, and `close()` ends it.

        It also ends when the service closes it. If it breaks, `reports(name)` has the reports that were missed.
        """
        feed = self._feed(name)
        next(feed)
        return feed

    # The service

    def model(self) -> Json:
        """Return what is served: version, method, predictor, norm, classes, limits …"""
        return self._object(self._call("GET", "v1/model"))

    def alarms(self) -> list[Json]:
        """Return the active alarms of all streams of this owner, the newest first."""
        return self._list(self._call("GET", "v1/alarms"), "alarms")

    def rollout(self) -> Json:
        """Return the live model, the shadow and how they compare; for the owner `operator`, if there are tokens."""
        return self._object(self._call("GET", "v1/rollout"))

    def switch(self, version: str) -> Json:
        """Let this version answer from now on; the other one is the shadow. It does nothing if this one is live."""
        return self._object(self._call("POST", "v1/rollout/switch", json={"to": version}))

    def audit(self) -> list[Json]:
        """Return who created, changed or deleted which stream, newest first."""
        return self._list(self._call("GET", "v1/audit"), "events")

    def _feed(self, name: str) -> Generator[Json, None, None]:
        timeout = self._httpx.Timeout(self.timeout, read=max(self.timeout, QUIET_FEED))
        headers = {"Accept": "text/event-stream"}
        response = self._call("GET", _path(name, "reports"), stream=True, headers=headers, timeout=timeout)
        with contextlib.closing(response):
            if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
                raise self._explain_unexpected(response)
            yield {}  # for `follow`: the feed is open
            try:
                for event, data in _events(response.iter_bytes()):
                    if event == "report":
                        yield json.loads(data)
            except self._httpx.RequestError as error:
                problem = f"the feed of {name} from {self.url} broke ({_describe(error)})"
                raise ServiceError(0, f"{problem}. Follow it again") from error
            except ValueError as error:
                raise self._explain_unexpected(response) from error

    def _call(
        self, method: str, path: str, *, repeatable: bool = True, stream: bool = False, **content: Any
    ) -> httpx.Response:
        """Send a request until it is answered or refused, or the retries are used up.

        A repeatable request does no harm if it is done twice, so it is also repeated if it may have been done.
        """
        httpx = self._httpx
        attempt = 0
        while True:
            last = attempt == self.retries
            try:
                response = self._http.send(self._http.build_request(method, path, **content), stream=stream)
                if response.is_success:
                    return response
                response.read()
            except httpx.RequestError as error:
                unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
                if last or not (unsent or repeatable):
                    raise self._explain_failure(error, f"{method} {path}", unsent) from error
                wait = 0.0
            else:
                status = response.status_code
                if last or not (status in REFUSED or (repeatable and status in UNSURE)):
                    raise self._explain_refusal(response)
                wait = _retry_after(response.headers.get("Retry-After", ""))
            # Random, so that clients that were refused together do not come back together.
            sleep(wait + min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.0))
            attempt += 1

    def _explain_failure(self, error: Exception, request: str, unsent: bool) -> ServiceError:
        message = (
            f"no answer from {self.url} to {request} ({_describe(error)}). The service may have done it: look at "
            "the stream before you repeat it (a batch may always be sent again with its key). If the service is only "
            f"slow, raise the timeout of {self.timeout:g} s"
        )
        if unsent:
            message = (
                f"cannot connect to {self.url} ({_describe(error)}). Check that the service runs (`safer serve`), that "
                "host and port are right, and that no proxy or firewall blocks them"
            )
        return ServiceError(0, message)

    def _explain_refusal(self, response: httpx.Response) -> ServiceError:
        try:
            content = response.json()
            message = content["error"]
        except (ValueError, KeyError, TypeError):  # a proxy's page, or another kind of service
            return self._explain_unexpected(response)
        known = f" (request {content['request_id']})" if response.status_code >= 500 and "request_id" in content else ""
        return ServiceError(response.status_code, f"{message}{known}")

    def _object(self, response: httpx.Response) -> Json:
        try:
            return {**response.json()}
        except (ValueError, TypeError) as error:  # not JSON, or not an object
            raise self._explain_unexpected(response) from error

    def _list(self, response: httpx.Response, field: str) -> list[Json]:
        content = self._object(response).get(field)
        if not isinstance(content, list):
            raise self._explain_unexpected(response)
        return content

    def _explain_unexpected(self, response: httpx.Response) -> ServiceError:
        request = f"{response.request.method} {response.request.url.path}"
        problem = f"{self.url} answered {request}, but not as the API does"
        advice = "Check that this is the address of a safer service of this version"
        return ServiceError(response.status_code, f"{problem}. {advice}")


def _import_httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise MissingPackageError("the client needs httpx: pip install 'safer-tta[serve]'") from error
    return httpx


def _checked_url(httpx: ModuleType, url: str) -> str:
    """Return the address without a slash at its end. Errors do not show it, since it may contain a password."""
    try:
        parts = httpx.URL(url)
        plain = parts.scheme in {"http", "https"} and parts.host and not (parts.userinfo or parts.query)
    except httpx.InvalidURL:
        plain = False
    if not plain:
        raise InvalidValueError(
            "url is invalid; expected http://host:port or https://host/path. It must not contain credentials or a "
            "query string; pass the token separately"
        )
    return url.rstrip("/")


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    token = token.strip()  # a token read from a file often ends with a line break
    if not token or not re.fullmatch(r"[!-~]+", token):
        raise InvalidValueError(
            "token is empty, or contains spaces or other characters than printable ASCII; give it as in the tokens file"
        )
    return {"Authorization": f"Bearer {token}"}


def _checked_key(key: str) -> str:
    if not re.fullmatch(r"[!-~]{1,128}", key):
        raise InvalidValueError(f"key is {key!r}; expected 1 to 128 printable ASCII characters without spaces")
    return key


def _path(name: str, *rest: str) -> str:
    """Return the address of a stream. An invalid name could lead to another address, so it is refused here."""
    if not re.fullmatch(r"[\w.-]{1,64}", name) or name in {".", ".."}:
        raise InvalidValueError(f"the stream name is {name!r}; expected 1 to 64 letters, digits, '.', '_' or '-'")
    return "/".join(("v1/streams", quote(name), *rest))


def _npy(images: NDArray[Any]) -> bytes:
    if images.dtype != np.uint8 or images.ndim != 4 or not len(images) or 3 not in (images.shape[1], images.shape[3]):
        raise InvalidValueError(
            f"images is an array of {images.dtype} {images.shape}; expected uint8 (B,H,W,3) or (B,3,H,W), B at least 1"
        )
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(images), allow_pickle=False)
    return file.getvalue()


def _files(images: Sequence[str | os.PathLike[str] | bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    """Return the parts of a form; files are read once, so that every retry sends the same."""
    if isinstance(images, (str, bytes, os.PathLike)):
        raise InvalidTypeError(
            "images is one image; expected a sequence of paths or contents of image files: put it into a list"
        )
    parts = []
    for number, image in enumerate(images):
        if isinstance(image, bytes):
            parts.append(("images", (f"image-{number}", image)))
        elif isinstance(image, (str, os.PathLike)):
            # The service shows the name in its errors; a form can only contain UTF-8.
            name = os.fsencode(Path(image).name).decode(errors="replace")
            parts.append(("images", (name, Path(image).read_bytes())))
        else:
            raise InvalidTypeError(f"images[{number}] is {type(image).__name__}; expected a path or bytes")
    if not parts:
        raise InvalidValueError("images is empty; expected at least one image file")
    return parts


def _retry_after(value: str) -> float:
    """Return the seconds that the server asks to wait, given as a number or a date; 0 if it gives neither."""
    try:
        if value[:1].isdigit():
            seconds = float(value)
        else:
            seconds = (email.utils.parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # neither, or a date without a time zone
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _events(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the kind and the data of each server-sent event; a line that starts with a colon is a comment."""
    event = "message"
    data: list[str] = []
    for line in _lines(chunks):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield event, "\n".join(data)
            event, data = "message", []
        elif field == "event":
            event = value
        elif field == "data":
            data.append(value)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield complete lines. httpx would also break them at characters such as U+2028, which JSON may contain."""
    rest = b""
    for chunk in chunks:
        *lines, rest = LINE_END.split(rest + chunk)
        for line in lines:
            yield line.decode(errors="replace")
