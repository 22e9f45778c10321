"""Errors repeat what came, and say what would be right; nothing here depends on the words between."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.helpers import NPY, array_file, pictures

LABELS = "/v1/streams/named/batches/1/labels"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def named(server):
    httpx.post(f"{server.url}/v1/streams", json={"name": "named"})
    images = array_file(pictures(1, 3)[0])
    assert httpx.post(f"{server.url}/v1/streams/named/batches", content=images, headers=NPY).status_code == 200
    return server.url


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "facts"),
    [
        ("PUT", LABELS, {"labels": [0, -7, 0]}, 422, ["labels.1", "-7", "0"]),
        ("PUT", LABELS, {"labels": [0, "x", 0]}, 422, ["labels.1", '"x"', "whole number"]),
        ("PUT", LABELS, {"labels": [0, 9, 0]}, 422, ["9", "0 to 6", "/v1/model"]),
        ("PUT", LABELS, {"labels": [0, 1]}, 422, ["2", "3"]),
        ("PUT", LABELS, {"labels": []}, 422, ["labels", "[]", "1"]),
        ("PUT", LABELS, {"lables": [0]}, 422, ["lables", "labels", "missing", "/docs"]),
        ("PUT", LABELS.replace("1/l", "77/l"), {"labels": [0]}, 404, ["77", "256", "/v1/streams/named/batches"]),
        ("PUT", "/v1/streams/named/batches/0/labels", {"labels": [0]}, 422, ["number", "0", "at least 1"]),
        ("GET", "/v1/streams/named/batches?last=1000", None, 422, ["last", "1000", "at most 256"]),
        ("GET", "/v1/streams/named/batches?last=x", None, 422, ["last", '"x"', "whole number"]),
        ("POST", "/v1/streams", {"name": ".x"}, 422, ["name", ".x", "64"]),
        ("POST", "/v1/streams", {"name": 7}, 422, ["name", "7", "text"]),
        ("POST", "/v1/streams", {"name": "named"}, 409, ["named"]),
        ("POST", "/v1/streams", b'{"name": ', 422, ["JSON", "character", "object"]),
        ("POST", "/v1/streams", b"[1]", 422, ["[1]", "object"]),
        ("GET", "/v1/streems", None, 404, ["/v1/streems", "/docs"]),
        ("PATCH", "/v1/streams/named", None, 405, ["PATCH", "DELETE, GET", "/docs"]),
    ],
)
def test_an_error_says_what_came_and_what_would_be_right(named, verb, path, body, status, facts):
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    answer = httpx.request(verb, named + path, content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    assert [fact for fact in facts if fact not in told] == [], told
    assert status != 405 or answer.headers["allow"] == "DELETE, GET"


@given(
    body=st.recursive(
        st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        st.lists,
        max_leaves=200,
    )
)
@settings(max_examples=50, deadline=None)
def test_whatever_comes_is_repeated_at_most_in_part(named, body):
    for content in ({"labels": body}, {"labels": [body]}, body):
        answer = httpx.put(named + LABELS, json=content)
        assert answer.status_code in (200, 413, 422)
        assert len(answer.json().get("error", "")) < 1000
