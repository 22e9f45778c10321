"""Spans for OpenTelemetry, if its API is installed; where they go is decided by the SDK that the operator sets up."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:  # the extra `otel` is not installed
    TRACER: Any = None
else:
    TRACER = trace.get_tracer("safer_tta.serve")


@contextmanager
def span(name: str) -> Iterator[None]:
    """Make a block a span below the current one."""
    if TRACER is None:
        yield
        return
    with TRACER.start_as_current_span(name):
        yield


def past_span(name: str, seconds: float) -> None:
    """Make the last seconds a span below the current one."""
    if TRACER is not None:
        now = time.time_ns()
        TRACER.start_span(name, start_time=now - round(seconds * 1e9)).end(now)


@contextmanager
def request_span(name: str, headers: Mapping[str, str], attributes: Mapping[str, str]) -> Iterator[Any]:
    """Make a block the span of a request, which continues the caller's trace. Yield a function that adds attributes."""
    if TRACER is None:
        yield lambda status, **more: None
        return
    began = {"context": propagate.extract(dict(headers)), "kind": trace.SpanKind.SERVER, "attributes": attributes}
    with TRACER.start_as_current_span(name, **began) as one:

        def finish(status: int, **more: str) -> None:
            one.set_attributes({"http.response.status_code": status, **more})
            if status >= 500:
                one.set_status(trace.Status(trace.StatusCode.ERROR))

        yield finish


def trace_id() -> str:
    """Return the id of the current trace, or nothing if no trace is recorded."""
    context = None if TRACER is None else trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context is not None and context.trace_flags.sampled else ""
