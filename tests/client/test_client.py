import copy
import email.utils
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.errors import InvalidTypeError, InvalidValueError, SaferError
from tests.client.conftest import CLASSES, TOKEN, parts, pictures, png, random_images, refuse
from tests.processes import python
from tests.serve.helpers import free_port


def test_streams_are_created_listed_changed_and_deleted(service, client):
    assert client.create()["name"] == "made-up"
    assert [s["name"] for s in client.streams()] == ["gate-7", "made-up"]
    assert client.stream("gate-7")["batches"] == 0
    for change, frozen in (("freeze", True), ("unfreeze", False), ("reset", False), ("rollback", False)):
        changed = getattr(client, change)("gate-7")
        assert (changed["frozen"], changed[change]) == (frozen, 1)
    client.delete("made-up")
    assert list(service.streams) == ["gate-7"]
    assert client.model()["classes"] == CLASSES
    assert client.audit()[0]["what"] == "create"


def test_labels_are_sent_and_reports_are_listed(service, client):
    for seed in range(3):
        client.send("gate-7", random_images(seed=seed))
    assert client.label("gate-7", 1, np.array([0, 2, 1]))["accuracy"] == 50.0
    assert service.labels == {1: [0, 2, 1]}
    assert [r["number"] for r in client.reports("gate-7", last=2)] == [1, 2]
    client.reports("gate-7")
    assert service.requests[-1].query == {"last": ["100"]}


def test_a_service_may_be_mounted_below_a_path(service):
    with Client(service.url + "/behind/proxy/", TOKEN) as client, pytest.raises(ServiceError):
        client.model()
    assert service.requests[-1].path == "/behind/proxy/v1/model"


@pytest.mark.parametrize("layout", ["last", "first", "strided"])
def test_arrays_arrive_as_they_are(service, client, layout):
    images = random_images()
    images = {"last": images, "first": images.transpose(0, 3, 1, 2), "strided": images[:, ::2]}[layout]
    answer = client.send("gate-7", images)
    assert (answer["number"], len(answer["labels"])) == (0, 3)
    np.testing.assert_array_equal(pictures(service.requests[-1]), images)


def test_files_and_bytes_arrive_as_they_are(service, client, tmp_path):
    images = random_images()
    contents = [png(image) for image in images]
    named = tmp_path / 'a "quoted" ü.png'
    named.write_bytes(contents[0])
    plain = tmp_path / "b.png"
    plain.write_bytes(contents[1])
    client.send("gate-7", [named, str(plain), contents[2]])
    arrived = parts(service.requests[-1])
    assert [content for _, content in arrived] == contents
    assert all('form-data; name="images"; filename="' in header for header, _ in arrived)
    np.testing.assert_array_equal(pictures(service.requests[-1]), images)


def test_invalid_images_are_not_sent(service, client):
    one = random_images()[0]
    batches = [random_images().astype(np.float32), one, random_images()[..., :2], random_images()[:0], []]
    for images in (*batches, np.array([[[[{}]]]], dtype=object)):
        with pytest.raises(InvalidValueError, match="expected"):
            client.send("gate-7", images)
    single = ["cat.png", b"\x89PNG", Path("cat.png"), [one]]
    for images in single:
        with pytest.raises(InvalidTypeError, match="expected"):
            client.send("gate-7", images)
    assert not service.requests


@pytest.mark.parametrize("fault", ["drop", "lose", *(refuse(s, "not now") for s in (429, 502, 503, 504))])
@pytest.mark.parametrize("form", ["array", "files"])
def test_a_batch_is_sent_again_and_applied_once(service, client, waits, fault, form):
    images = random_images()
    service.faults = [fault, fault]
    answer = client.send("gate-7", images if form == "array" else [png(image) for image in images])
    assert answer["number"] == 0
    assert service.streams["gate-7"]["batches"] == 1
    sent = service.asked("POST", "/batches")
    assert (len(sent), len({r.key for r in sent})) == (3, 1)
    assert re.fullmatch("[0-9a-f]{32}", sent[0].key)
    for request in sent:
        np.testing.assert_array_equal(pictures(request), images)
    assert 0.125 <= waits[0] <= 0.25
    assert 0.25 <= waits[1] <= 0.5


def test_every_batch_has_its_own_key_unless_one_is_given(service, client):
    for key in (None, None, "mine:1", "mine:1"):
        client.send("gate-7", random_images(), key=key)
    keys = [r.key for r in service.asked("POST", "/batches")]
    assert keys[0] != keys[1]
    assert keys[2:] == ["mine:1", "mine:1"]
    assert service.streams["gate-7"]["batches"] == 3


def test_invalid_keys_and_names_are_not_sent(service, client):
    for key in ("", "x" * 129, "two\nlines", "ü", "a blank"):
        with pytest.raises(InvalidValueError, match="key is"):
            client.send("gate-7", random_images(), key=key)
    for name in ("", ".", "..", "a/b", "a/../b", "a?b", "a b", "x" * 65):  # these would lead to another address
        with pytest.raises(InvalidValueError, match="stream name"):
            client.delete(name)
    assert not service.requests


SECONDS = {"3": 3, "0": 0, "86400": 30, "-5": 0, "nan": 0, "soon": 0, "in an hour": 30, "an hour ago": 0}
DATES = {"in an hour": 3600, "an hour ago": -3600}


@pytest.mark.parametrize("said", SECONDS)
def test_retry_after_is_honoured_within_bounds(service, client, waits, said):
    value = email.utils.formatdate(time.time() + DATES[said], usegmt=True) if said in DATES else said
    service.faults = [refuse(429, "too much at once", Retry_After=value)]
    client.send("gate-7", random_images())
    assert len(waits) == 1
    assert SECONDS[said] <= waits[0] <= SECONDS[said] + 0.25


def test_retries_are_limited(service, waits):
    service.faults = [refuse(429, "the queue is full", Retry_After="1")] * 9
    with Client(service.url, retries=2) as client, pytest.raises(ServiceError, match="the queue is full") as caught:
        client.model()
    assert caught.value.status == 429
    assert (len(service.requests), len(waits)) == (3, 2)


@pytest.mark.parametrize("what", ["create", "delete", "rollback"])
def test_a_request_that_may_have_been_done_is_not_repeated(service, client, waits, what):
    service.faults = ["lose"]
    with pytest.raises(ServiceError, match="may have done it") as caught:
        getattr(client, what)("gate-7")
    assert caught.value.status == 0
    service.faults = [refuse(504, "the gateway gave up")]
    with pytest.raises(ServiceError, match="the gateway gave up"):
        getattr(client, what)("gate-7")
    assert not waits
    client.create("gate-7")
    service.faults = [refuse(503, "not ready")]  # nothing was done, so it may be asked again
    getattr(client, what)("gate-7")
    assert len(waits) == 1


def test_errors_have_the_status_and_the_words_of_the_service_and_can_be_copied(service, client):
    with pytest.raises(ServiceError) as caught:
        client.stream("nowhere")
    assert (caught.value.status, caught.value.message) == (404, "there is no stream nowhere")
    assert str(caught.value).endswith("(HTTP 404)")
    assert isinstance(caught.value, SaferError)
    assert len(service.requests) == 1
    service.faults = [refuse(409, "this key came with other images")]
    with pytest.raises(ServiceError, match="other images") as caught:
        client.send("gate-7", random_images())
    copied = copy.copy(caught.value)  # as process pools do
    assert (copied.status, copied.message) == (409, "this key came with other images")


OTHERS = [(200, {}, body) for body in (b"<html>welcome</html>", b"[1, 2]", b"{}")]
OTHERS += [(401, {}, b"<html>who are you</html>"), (500, {}, b"[]")]


@pytest.mark.parametrize("fault", [*OTHERS, (307, {"Location": "http://127.0.0.1:9/elsewhere"}, b"")])
def test_answers_of_other_services_are_refused(service, client, fault):
    service.faults = [fault]
    with pytest.raises(ServiceError, match="not as the API does") as caught:
        client.streams()
    assert caught.value.status == fault[0]
    assert len(service.requests) == 1


def test_a_missing_service_is_reported(waits, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", TOKEN) as client, pytest.raises(ServiceError) as caught:
        client.create("gate-7")
    assert re.search(f"cannot connect to http://127.0.0.1:{port}.*safer serve", str(caught.value))
    assert (caught.value.status, len(waits)) == (0, 5)


def test_a_service_that_never_answers_is_reported(service):
    deaf = socket.create_server(("127.0.0.1", 0))
    client = Client(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.05, retries=0)
    with deaf, client, pytest.raises(ServiceError, match=r"ReadTimeout.*raise the timeout of 0\.05 s") as caught:
        client.send("gate-7", random_images())
    assert caught.value.status == 0


def test_the_token_is_sent_and_never_shown(service):
    service.faults = [refuse(401, "wrong token"), "drop"]
    with Client(service.url, TOKEN + "\n", retries=0) as client:
        shown = [repr(client), str(client), repr(vars(client))]
        for _ in range(2):
            with pytest.raises(ServiceError) as caught:
                client.model()
            shown += [repr(caught.value), str(caught.value), repr(caught.value.__cause__)]
    assert service.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert not [text for text in shown if TOKEN in text]
    with Client(service.url) as client:
        client.model()
    assert "authorization" not in service.requests[-1].headers


def test_invalid_options_are_refused_and_secrets_not_shown():
    urls = ["127.0.0.1:8017", "ftp://host", "http://", "http://host:port", "http://u:s3cr@host", "http://h?t=s3cr"]
    tokens = ["", "two s3crs", "s3cret\r\nX-Evil: 1", "s3crét"]
    options = [{"url": url} for url in urls] + [{"token": token} for token in tokens]
    for option in (*options, {"timeout": 0}, {"timeout": float("nan")}, {"retries": -1}):
        with pytest.raises(InvalidValueError, match=f"{next(iter(option))} is") as caught:
            Client(**{"url": "http://127.0.0.1:1", **option})
        assert "s3cr" not in str(caught.value)


def test_without_httpx_the_error_says_what_to_install():
    code = "import sys; sys.modules['httpx'] = sys.modules['torch'] = None\n"  # and torch is not needed at all
    code += "from safer_tta.client import Client\nClient('http://127.0.0.1:1')"
    missing = "MissingPackageError: the client needs httpx: pip install 'safer-tta[serve]'\n"
    assert python("-c", code).stderr.endswith(missing)


def test_the_feed_is_read_as_the_standard_says(service, client):
    reports = list(client.follow("gate-7"))
    assert reports == [{"number": 0, "alarm": ""}, {"number": 1, "views": ["a\u2028b → c"]}]
    headers = service.requests[-1].headers
    assert (headers["accept"], headers["authorization"]) == ("text/event-stream", f"Bearer {TOKEN}")


def test_the_feed_is_open_before_it_is_read_and_can_be_closed(service, client):
    service.faults = [refuse(503, "starting")]
    feed = client.follow("gate-7")
    assert len(service.asked("GET", "/reports")) == 2
    assert next(feed)["number"] == 0
    feed.close()
    assert client.stream("gate-7")["name"] == "gate-7"


def test_feeds_that_are_invalid_or_break_are_reported(service, client):
    with pytest.raises(ServiceError, match="no stream nowhere") as caught:
        client.follow("nowhere")
    assert caught.value.status == 404
    service.faults = [(200, {}, b"{}")]
    with pytest.raises(ServiceError, match="not as the API does"):
        client.follow("gate-7")
    service.feed = b"event: report\ndata: {broken\n\n"
    with pytest.raises(ServiceError, match="not as the API does"):
        list(client.follow("gate-7"))
    short = b'event: report\ndata: {"number": 0}\n\n'
    service.faults = [(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}, b"ffff\r\n" + short)]
    service.faults[0][1]["Connection"] = "close"
    with pytest.raises(ServiceError, match="broke") as caught:
        list(client.follow("gate-7"))
    assert caught.value.status == 0
