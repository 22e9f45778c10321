"""Talk to a running service (`safer serve`) from Python. What it is asked and answers is told in docs/serve.md.

with Client("http://127.0.0.1:8017", token) as client:
    client.create("gate-7")
    answer = client.send("gate-7", images)     # a uint8 array, or a list of paths or bytes of image files
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
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]
Images = NDArray[np.uint8] | Sequence[str | os.PathLike[str] | bytes]

REFUSED = {429, 503}  # the server did nothing: anything may be asked again
UNSURE = {502, 504}  # a proxy lost the server's answer: only what may be applied twice, or has a key, is asked again
FIRST_WAIT = 0.25  # seconds, doubled with every attempt
LONGEST_WAIT = 30.0
QUIET_FEED = 45.0  # the server writes a comment every 15 s: three missing ones are a dead connection
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a \r at the end may be the first half of \r\n


class ServiceError(RuntimeError):
    """The service said no, in its own words; status 0: it could not be reached, or did not answer to the end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})" if self.status else self.message


class Client:
    """A connection to one service.

    url: where it listens, with the path it is mounted under, if any.
    timeout: seconds to wait for a connection, and for each piece of an answer.
    retries: how often a request is sent again after a broken connection, a 429, 502, 503 or 504. What would do harm
        if it were done twice (create, delete, rollback) is sent again only if the service certainly did not do it.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 5) -> None:
        if retries < 0 or not timeout > 0:
            raise ValueError(f"got timeout={timeout}, retries={retries}; expected more than 0 s and at least 0 retries")
        self._httpx = _import_httpx()
        self.url, self.timeout, self.retries = _checked_url(self._httpx, url), timeout, retries
        self._http: httpx.Client = self._httpx.Client(
            base_url=self.url,
            headers={"Accept": "application/json"} | _authorization(token),
            timeout=timeout,
            # Below the 5 s after which servers drop an idle connection, so that no request meets one that is going.
            limits=self._httpx.Limits(keepalive_expiry=2.0),
        )

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Streams

    def create(self, name: str | None = None) -> Json:
        """Create a stream; the service makes a name up if none is given."""
        content: Json = {} if name is None else {"json": {"name": name}}
        return self._object(self._call("POST", "v1/streams", repeatable=False, **content))

    def streams(self) -> list[Json]:
        return self._list(self._call("GET", "v1/streams"), "streams")

    def stream(self, name: str) -> Json:
        return self._object(self._call("GET", _path(name)))

    def delete(self, name: str) -> None:
        """Forget a stream, state and all."""
        self._call("DELETE", _path(name), repeatable=False)

    def freeze(self, name: str) -> Json:
        """Predict only, until `unfreeze`."""
        return self._object(self._call("POST", _path(name, "freeze")))

    def unfreeze(self, name: str) -> Json:
        return self._object(self._call("POST", _path(name, "unfreeze")))

    def reset(self, name: str) -> Json:
        """Back to the source model."""
        return self._object(self._call("POST", _path(name, "reset")))

    def rollback(self, name: str) -> Json:
        """Back to the last healthy state; asked again, to one before it."""
        return self._object(self._call("POST", _path(name, "rollback"), repeatable=False))

    # Batches

    def send(self, name: str, images: Images, *, key: str | None = None) -> Json:
        """Have a batch answered, and learnt from.

        images: a uint8 array (B,H,W,3) or (B,3,H,W) of the model's side, or a sequence of paths or contents of PNG,
            JPEG or WebP files of any size.
        key: the service applies a key once, however often the batch arrives. Give one of your own if your process may
            die and send the batch again; without, it is random and covers the retries within this call.
        """
        headers = {"Idempotency-Key": _checked_key(uuid.uuid4().hex if key is None else key)}
        content: Json
        if isinstance(images, np.ndarray):
            headers["Content-Type"] = "application/x-npy"
            content = {"content": _npy(images)}
        else:
            content = {"files": _files(images)}
        return self._object(self._call("POST", _path(name, "batches"), headers=headers, **content))

    def label(self, name: str, number: int, labels: Iterable[int]) -> Json:
        """Tell what the images of a batch really were, in their order; its report comes back with the accuracy."""
        content = {"labels": [int(label) for label in labels]}
        return self._object(self._call("PUT", _path(name, "batches", str(int(number)), "labels"), json=content))

    def reports(self, name: str, last: int = 100) -> list[Json]:
        """Reports of the last batches, oldest first; the service keeps 256."""
        return self._list(self._call("GET", _path(name, "batches"), params={"last": last}), "reports")

    def follow(self, name: str) -> Generator[Json, None, None]:
        """Reports as batches are answered, from now on: the feed is open when this returns. `close()` ends it.

        It ends by itself when the service closes it. If it breaks, `reports(name)` has what was missed.
        """
        feed = self._feed(name)
        next(feed)
        return feed

    # The service

    def model(self) -> Json:
        """What is served: version, method, predictor, classes, limits …"""
        return self._object(self._call("GET", "v1/model"))

    def audit(self) -> list[Json]:
        """Who reset, rolled back, froze, created or deleted what, newest first."""
        return self._list(self._call("GET", "v1/audit"), "events")

    def _feed(self, name: str) -> Generator[Json, None, None]:
        timeout = self._httpx.Timeout(self.timeout, read=max(self.timeout, QUIET_FEED))
        headers = {"Accept": "text/event-stream"}
        response = self._call("GET", _path(name, "reports"), stream=True, headers=headers, timeout=timeout)
        with contextlib.closing(response):
            if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
                raise self._strange(response)
            yield {}  # for `follow`: the feed is open
            try:
                for event, data in _events(response.iter_bytes()):
                    if event == "report":
                        yield json.loads(data)
            except self._httpx.RequestError as error:
                raise ServiceError(
                    0, f"the feed of {name} from {self.url} broke ({_words(error)}). Follow it again"
                ) from error
            except ValueError as error:
                raise self._strange(response) from error

    def _call(
        self, method: str, path: str, *, repeatable: bool = True, stream: bool = False, **content: Any
    ) -> httpx.Response:
        """Ask until there is an answer, it is no, or the retries are used up.

        repeatable: asked twice, it does no harm, so it is asked again also if it may have been done.
        """
        attempt = 0
        while True:
            last = attempt == self.retries
            try:
                response = self._http.send(self._http.build_request(method, path, **content), stream=stream)
                if response.is_success:
                    return response
                response.read()
            except self._httpx.RequestError as error:
                unsent = isinstance(
                    error, (self._httpx.ConnectError, self._httpx.ConnectTimeout, self._httpx.PoolTimeout)
                )
                if last or not (unsent or repeatable):
                    raise self._unreachable(error, f"{method} {path}", unsent) from error
                asked = 0.0
            else:
                status = response.status_code
                if last or not (status in REFUSED or (repeatable and status in UNSURE)):
                    raise self._refusal(response)
                asked = _retry_after(response.headers.get("Retry-After", ""))
            # Clients that were turned away together shall not come back together.
            sleep(asked + min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.0))
            attempt += 1

    def _unreachable(self, error: Exception, request: str, unsent: bool) -> ServiceError:
        if unsent:
            return ServiceError(
                0,
                f"cannot connect to {self.url} ({_words(error)}). Check that the service runs (`safer serve`), that "
                "host and port are right, and that no proxy or firewall stands between",
            )
        return ServiceError(
            0,
            f"no answer from {self.url} to {request} ({_words(error)}). It may have been done or not: look at the "
            "stream before you ask again (a batch sent with the same key is safe to send). If the service is only "
            f"slow, raise the timeout of {self.timeout:g} s",
        )

    def _refusal(self, response: httpx.Response) -> ServiceError:
        try:
            words = response.json()["error"]
        except (ValueError, KeyError, TypeError):  # a proxy's page, or no safer service at all
            return self._strange(response)
        return ServiceError(response.status_code, str(words))

    def _object(self, response: httpx.Response) -> Json:
        try:
            content = response.json()
        except ValueError as error:
            raise self._strange(response) from error
        if not isinstance(content, dict):
            raise self._strange(response)
        return content

    def _list(self, response: httpx.Response, field: str) -> list[Json]:
        content = self._object(response).get(field)
        if not isinstance(content, list):
            raise self._strange(response)
        return content

    def _strange(self, response: httpx.Response) -> ServiceError:
        request = f"{response.request.method} {response.request.url.path}"
        return ServiceError(
            response.status_code,
            f"{self.url} answered {request}, but not in the words of the API. Check that this address is a safer "
            "service of this version, and nothing else in its place",
        )


def _import_httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("the client needs httpx: pip install 'safer-tta[serve]'") from error
    return httpx


def _checked_url(httpx: ModuleType, url: str) -> str:
    """The address without a slash at its end. A refused one is not repeated: it may hold a password."""
    try:
        parts = httpx.URL(url)
        plain = parts.scheme in {"http", "https"} and parts.host and not (parts.userinfo or parts.query)
    except httpx.InvalidURL:
        plain = False
    if not plain:
        raise ValueError(
            "got a url that is not of the form http://host:port or https://host/path; a user, password or query "
            "does not belong into it: give the token as token="
        )
    return url.rstrip("/")


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    token = token.strip()  # read from a file, it often ends with a line break
    if not token or not re.fullmatch(r"[!-~]+", token):
        raise ValueError("got a token that is empty or has blanks or other signs than printable ASCII in it")
    return {"Authorization": f"Bearer {token}"}


def _checked_key(key: str) -> str:
    if not re.fullmatch(r"[!-~]{1,128}", key):
        raise ValueError(f"got the key {key!r}; expected 1 to 128 printable ASCII characters without blanks")
    return key


def _path(name: str, *rest: str) -> str:
    """The address of a stream. A name that is none could lead to another address, so it does not leave this machine."""
    if not re.fullmatch(r"[\w.-]{1,64}", name) or name in {".", ".."}:
        raise ValueError(f"got the stream name {name!r}; expected 1 to 64 letters, digits, '.', '_' or '-'")
    return "/".join(("v1/streams", quote(name), *rest))


def _npy(images: NDArray[Any]) -> bytes:
    if images.dtype != np.uint8 or images.ndim != 4 or not len(images) or 3 not in (images.shape[1], images.shape[3]):
        raise ValueError(
            f"got an array of {images.dtype} {images.shape}; expected uint8 (B,H,W,3) or (B,3,H,W) with B of 1 or more"
        )
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(images), allow_pickle=False)
    return file.getvalue()


def _files(images: Sequence[str | os.PathLike[str] | bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    """Parts of a form, read once, so that every retry sends the same."""
    if isinstance(images, (str, bytes, os.PathLike)):
        raise TypeError("got one image; expected a sequence of paths or contents of image files: put it into a list")
    parts = []
    for number, image in enumerate(images):
        if isinstance(image, bytes):
            parts.append(("images", (f"image-{number}", image)))
        elif isinstance(image, (str, os.PathLike)):
            # The name is for the service's error messages; one that is not UTF-8 could not be written into the form.
            name = os.fsencode(Path(image).name).decode(errors="replace")
            parts.append(("images", (name, Path(image).read_bytes())))
        else:
            raise TypeError(f"got an image of type {type(image).__name__}; expected a path or the bytes of a file")
    if not parts:
        raise ValueError("got no images; expected a batch of at least one")
    return parts


def _retry_after(value: str) -> float:
    """Seconds that the server asks to wait, as a number or a date; 0 if it does not say."""
    try:
        seconds = float(value) if value[:1].isdigit() else _until(value)
    except (ValueError, TypeError):  # neither, or a date without a time zone
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def _until(date: str) -> float:
    return (email.utils.parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _events(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """The kind and the data of each server-sent event; a line that starts with a colon is a comment."""
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
    """Whole lines. httpx has its own, but it also breaks at signs such as U+2028, which JSON may hold as they are."""
    rest = b""
    for chunk in chunks:
        *lines, rest = LINE_END.split(rest + chunk)
        for line in lines:
            yield line.decode(errors="replace")
