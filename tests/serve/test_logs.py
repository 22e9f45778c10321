import io
import json
import logging
import re

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from safer_tta.serve import logs
from safer_tta.serve.app import create_app
from safer_tta.serve.record import ID, Record, choose_id
from safer_tta.serve.tokens import Tokens
from tests.serve.helpers import CHEAP, NPY, TOKENS, array_file, converse, engine_of, pictures, serving

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) ")
ANNA = {"Authorization": "Bearer " + "a" * 20}
texts = st.text(st.characters(codec=None), max_size=300)


@pytest.fixture
def written():
    """Return a function that gives what has been logged as JSON, written when it happened."""
    stream, log = io.StringIO(), logging.getLogger("safer_tta.serve")
    handler, level = logging.StreamHandler(stream), log.level
    handler.setFormatter(logs.JsonLines())
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.removeHandler(handler)
    log.setLevel(level)


def access(server) -> list[dict]:
    found = (json.loads(line) for line in server.log.read_text().splitlines())
    return [line for line in found if line["logger"] == "safer_tta.serve.access"]


def test_every_request_is_one_json_line_with_what_an_operator_asks_for(source_file, tmp_path):
    (tmp_path / "tokens.json").write_text(json.dumps({"anna": "a" * 20, "bert": "b" * 20}))
    options = ("--tokens", str(tmp_path / "tokens.json"), "--log-format", "json")
    with serving(source_file, tmp_path / "served", *options) as server:
        content, with_id = array_file(pictures(1)[0]), {"X-Request-ID": "from-the-camera:7"}
        batches = f"{server.url}/v1/streams/gate/batches"
        made = httpx.post(f"{server.url}/v1/streams", json={"name": "gate"}, headers=ANNA)
        sent = httpx.post(batches, content=content, headers={**ANNA, **NPY, **with_id})
        wrong = [httpx.post(batches, content=content, headers={"Authorization": "Bearer no"}) for _ in range(20)]
        for path in ("/healthz", "/livez", "/readyz", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        told = access(server)
    assert [answer.status_code for answer in (made, sent, *wrong)] == [201, 200] + [401] * 20
    assert [line["status"] for line in told] == [201, 200] + [401] * 20  # and no line for a probe
    created, batch, refused = told[:3]
    assert (created["stream"], created["owner"]) == ("gate", "anna")
    assert batch.items() >= {
        "request_id": "from-the-camera:7", "owner": "anna", "stream": "gate", "method": "POST", "level": "info",
        "route": "/v1/streams/{name}/batches", "status": 200, "bytes_in": len(content), "bytes_out": len(sent.content),
        "client": "127.0.0.1",
    }.items()  # fmt: skip
    parts = [batch[f"{name}_seconds"] for name in ("decode", "queue", "model", "commit")]
    assert all(seconds >= 0 for seconds in parts)
    assert sum(parts) <= batch["seconds"] + 0.001
    assert refused["reason"] == "token"
    assert "owner" not in refused
    assert sent.headers["X-Request-ID"] == "from-the-camera:7"
    ids = [answer.headers["X-Request-ID"] for answer in wrong]
    assert [answer.json()["request_id"] for answer in wrong] == ids == [line["request_id"] for line in told[2:]]
    assert len(set(ids)) == 20


def test_probes_are_logged_at_debug_and_nothing_of_requests_at_warning(source_file, tmp_path, caplog):
    with engine_of(source_file, tmp_path, **CHEAP) as made:

        async def talk(asking):
            return [(await asking.get(path)).status_code for path in ("/livez", "/metrics", "/openapi.json")]

        caplog.set_level(logging.DEBUG, logger="safer_tta.serve")
        assert converse(create_app(made, TOKENS), talk) == [200, 200, 200]
    found = [(record.levelno, record.fields["route"]) for record in caplog.records if hasattr(record, "fields")]
    assert found == [(logging.DEBUG, "/livez"), (logging.DEBUG, "/metrics"), (logging.INFO, "/openapi.json")]


def test_a_bug_is_logged_once_with_the_id_that_the_client_got(source_file, tmp_path, monkeypatch, written):
    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        monkeypatch.setattr(made.journal, "commit", lambda *_: 1 / 0)
        monkeypatch.setattr(made.journal, "audit", lambda *_: 1 / 0)

        async def talk(asking):
            content = array_file(pictures(1)[0])
            batch = await asking.post("/v1/streams/a/batches", content=content, headers=NPY)
            return [batch, await asking.get("/v1/audit")]

        answers = converse(create_app(made, Tokens()), talk)
    assert [answer.status_code for answer in answers] == [500, 500]
    assert all("ZeroDivisionError" not in answer.text for answer in answers)
    failures = [line for line in written() if "exception" in line]
    assert [line["level"] for line in failures] == ["error", "error"]
    assert [line["exception"].count("Traceback") for line in failures] == [1, 1]
    assert all("ZeroDivisionError" in line["exception"] for line in failures)
    ids = [line["request_id"] for line in failures]
    assert ids == [answer.json()["request_id"] for answer in answers]
    assert [line["status"] for line in written() if line.get("request_id") in ids and "status" in line] == [500, 500]


def test_a_bug_in_front_of_every_handler_is_an_answer_too(source_file, tmp_path, monkeypatch, written):
    with engine_of(source_file, tmp_path, **CHEAP) as made:
        app = create_app(made, TOKENS)
        monkeypatch.setattr(app.app, "app", None)

        async def talk(asking):
            return await asking.get("/livez")

        answer = converse(app, talk)
    assert answer.status_code == 500
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    failures = [line for line in written() if "exception" in line]
    assert len(failures) == 1


@given(wanted=texts)
def test_only_a_bounded_printable_word_is_taken_as_an_id(wanted):
    given_id = choose_id(wanted)
    assert ID.fullmatch(given_id)
    assert given_id == wanted or len(given_id) == 16
    assert given_id.isprintable()
    assert not set(given_id) & set(' "\\\n\r\t\x1b')
    assert len(given_id) <= 128


@pytest.fixture
def unseen(monkeypatch):
    """Records that are not captured: xdist cannot send a report that contains half a surrogate pair."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    for name in ("log", "access"):
        alone = logging.Logger(getattr(logs, name).name)
        alone.addHandler(handler)
        monkeypatch.setattr(logs, name, alone)
    return records


@given(path=texts, client=texts, words=texts)
@example(path="\ud800", client="\udfff", words="\ud800")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_a_client_sends_breaks_a_line(unseen, path, client, words):
    unseen.clear()
    logs.log_access(Record(id="1", method="GET", route="unknown", path=path, client=client), 0.1)
    logs.log_failure(words, ValueError(words))
    assert len(unseen) == 2
    for record in unseen:
        first, *more = logs.TextLines().format(record).split("\n")
        assert STAMP.match(first)
        assert all(line.startswith("    ") for line in more)  # of a traceback, and never like a line of its own
        assert all(character.isprintable() for line in (first, *more) for character in line)
        told = logs.JsonLines().format(record)
        assert told.isprintable()
        assert json.loads(told)["time"] == first.split()[0]


def test_hostile_headers_and_paths_stay_in_their_line(source_file, tmp_path):
    forged = "2026-01-01T00:00:00.000Z INFO    GET /forged 200"
    with serving(source_file, tmp_path / "served", "--method", "none", "--predictor", "plain") as server:
        bad = {"X-Request-ID": f"a owner=root {'x' * 300}", "X-Forwarded-For": "1.2.3.4 owner=root"}
        for path in (f"/x%0A{forged}%1B[31m%E2%80%AE", "/v1/streams/%0Aowner=root", "/" + "y" * 5000):
            httpx.get(server.url + path, headers=bad)
        server.stop()
        told = server.log.read_text().split("\n")
    assert told.pop() == ""
    assert all(STAMP.match(line) for line in told)
    assert all(character.isprintable() for line in told for character in line)
    assert not any(line.startswith(forged[:24]) for line in told)
    assert not any(re.search(r" owner=root", re.sub(r'"(\\.|[^"\\])*"', "", line)) for line in told)
    assert max(map(len, told)) < 1000
    assert sum(" GET " in line for line in told) == 3
