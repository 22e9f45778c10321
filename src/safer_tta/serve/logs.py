"""The log of a service: one line for each event, as text or as JSON, which nothing that a client sends can break."""

import json
import logging
import sys
import time
import traceback
from typing import Any, Literal

from . import tracing
from .record import Record, current

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
QUIET = frozenset({"/healthz", "/livez", "/readyz", "/metrics"})  # asked every few seconds: a line for each is noise
LONGEST_PATH = 200
SAID = {"method", "route", "status"}  # by the message of an access line
access = logging.getLogger("safer_tta.serve.access")
log = logging.getLogger("safer_tta.serve")


def set_up(style: Format = "text", level: Level = "info") -> None:
    """Send the log of this process to stderr. For programs: a library leaves that to who uses it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("safer_tta").setLevel(level.upper())
    logging.captureWarnings(True)


def log_access(record: Record, seconds: float) -> None:
    """Write the line of an answered request."""
    fields: dict[str, Any] = {"method": record.method, "route": record.route, "status": record.status}
    fields |= {
        "seconds": round(seconds, 4),
        "owner": record.owner,
        "stream": record.stream,
        "reason": record.reason,
        "path": record.path,
    }
    fields |= {"bytes_in": record.received, "bytes_out": record.sent, "client": record.client}
    fields |= {f"{name}_seconds": round(taken, 4) for name, taken in record.seconds.items()}
    told = {name: value for name, value in fields.items() if value != ""}
    level = logging.DEBUG if record.route in QUIET else logging.INFO
    access.log(level, "%s %s %s", record.method, record.route, record.status, extra={"fields": told})


def log_failure(what: str, error: BaseException) -> None:
    """Log a failure with its traceback, unless another thread has logged the same one already."""
    if not error.__dict__.get("logged"):
        error.__dict__["logged"] = True
        log.error(what, exc_info=error)


class _Lines(logging.Formatter):
    def describe(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return what a line says of where it belongs."""
        request = current.get()
        context = {} if request is None else {"request_id": request.id}
        trace = tracing.trace_id()
        return getattr(record, "fields", {}) | context | ({"trace_id": trace} if trace else {})

    def traceback_of(self, record: logging.LogRecord) -> str:
        return "" if not record.exc_info else "".join(traceback.format_exception(*record.exc_info))


class JsonLines(_Lines):
    """A JSON object a line; non-ASCII is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _moment(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | self.describe(record)
        trace = self.traceback_of(record)
        return json.dumps(line | ({"exception": trace} if trace else {}), default=str)


class TextLines(_Lines):
    """A line for people; those of a traceback are indented, so that only whole lines begin with a time."""

    def format(self, record: logging.LogRecord) -> str:
        told = {name: value for name, value in self.describe(record).items() if name not in SAID}
        source = [] if record.name == access.name else [f"{record.name}:"]
        words = [_moment(record), f"{record.levelname:7}", *source, _escape(record.getMessage())]
        line = " ".join([*words, *(f"{name}={_word(value)}" for name, value in told.items())])
        trace = self.traceback_of(record).rstrip("\n")
        return line if not trace else "\n    ".join([line, *map(_escape, trace.split("\n"))])


def _moment(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _escape(text: str) -> str:
    """Write what does not print, such as line ends and the escape codes of terminals, as Python writes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _word(value: object) -> str:
    """Return a value as one word, in quotes if it contains spaces, quotes or =."""
    text = str(value)
    return json.dumps(text) if not text.isprintable() or any(c in text for c in ' "=') else text
