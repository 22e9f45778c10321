import pytest

from safer_tta.serve import tracing
from safer_tta.serve.app import create_app
from safer_tta.serve.tokens import Tokens
from tests.processes import python
from tests.serve.helpers import CHEAP, NPY, array_file, converse, engine_of, pictures

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from safer_tta.serve import tracing
assert tracing.TRACER is None and tracing.trace_id() == ""
with tracing.request_span("GET /", {}, {}) as finish, tracing.span("model"):
    tracing.past_span("queue", 1.0)
    finish(200)
"""


@pytest.fixture
def spans(monkeypatch):
    """Return a function that gives the finished spans by name, in a provider of the test's own."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("test"))
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


def test_the_parts_of_a_request_are_spans_of_the_caller_s_trace(source_file, tmp_path, spans, caplog):
    caplog.set_level("INFO", logger="safer_tta.serve")

    async def talk(asking):
        headers = {**NPY, "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "mine"}
        content = array_file(pictures(1)[0])
        good = await asking.post("/v1/streams/a/batches", content=content, headers=headers)
        made.journal.reports = None
        return good.status_code, (await asking.get("/v1/streams/a/batches")).status_code

    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        assert converse(create_app(made, Tokens()), talk) == (200, 500)
    found = spans()
    request = found["POST /v1/streams/{name}/batches"]
    parts = [found[name] for name in ("decode", "queue", "model", "commit")]
    assert {span.context.trace_id for span in (request, *parts)} == {int(TRACE, 16)}
    assert request.parent.span_id == int(PARENT, 16)
    assert {span.parent.span_id for span in parts} == {request.context.span_id}
    assert all(request.start_time <= span.start_time <= span.end_time <= request.end_time for span in parts)
    assert request.attributes.items() >= {
        "http.request.method": "POST", "http.response.status_code": 200, "safer.request_id": "mine",
        "safer.owner": "local", "safer.stream": "a", "http.route": "/v1/streams/{name}/batches",
    }.items()  # fmt: skip
    failed = found["GET /v1/streams/{name}/batches"]
    assert failed.attributes["http.response.status_code"] == 500
    assert not failed.status.is_ok
    assert failed.context.trace_id != request.context.trace_id


def test_without_the_package_there_are_no_spans_and_nothing_fails():
    done = python("-c", WITHOUT)
    assert done.returncode == 0, done.stderr


def test_without_a_provider_nothing_is_recorded():
    with tracing.request_span("GET /", {}, {}) as finish:
        assert tracing.trace_id() == ""
        finish(200)
