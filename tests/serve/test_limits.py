import asyncio
import contextlib
import threading

import numpy as np
import pytest

from safer_tta.serve import uploads
from safer_tta.serve.app import create_app
from safer_tta.serve.limits import Limits, RateLimit, Refused
from safer_tta.serve.shares import Share, Shares
from safer_tta.serve.tokens import Tokens
from safer_tta.serve.turns import owner_of
from safer_tta.serve.uploads import Decoder
from tests.serve.helpers import (
    CHEAP,
    NPY,
    SIDE,
    TOKENS,
    Replay,
    array_file,
    converse,
    engine_of,
    image_file,
    pictures,
    send,
)

GOOD = array_file(np.zeros((1, SIDE, SIDE, 3), np.uint8))


@contextlib.contextmanager
def held(made, stream):
    """Keep the engine's thread at work for a stream."""
    begun, hold = threading.Event(), threading.Event()

    def work():
        begun.set()
        hold.wait(60)

    made.submit(stream, work)
    assert begun.wait(60)
    try:
        yield
    finally:
        hold.set()


def test_a_full_queue_says_when_to_come_back(source_file, tmp_path):
    limits = Limits(queue=3, stream_queue=2, owner_queue=3)
    with engine_of(source_file, tmp_path, limits=limits, **CHEAP) as made, held(made, "local/x"):
        made.submit("local/x", int)
        with pytest.raises(Refused, match="of this stream") as refused:
            made.submit("local/x", int)
        assert refused.value.status == 429
        assert refused.value.retry_after >= 1
        made.submit("local/y", int)
        with pytest.raises(Refused, match="of this owner"):
            made.submit("local/z", int)
        made.submit("other/z", int)
        with pytest.raises(Refused, match="the queue of the service is full") as refused:
            made.submit("third/z", int)
        assert refused.value.status == 429


def test_a_stream_that_is_behind_is_answered_without_learning(source_file, tmp_path):
    images = pictures(6, 2)
    with engine_of(source_file, tmp_path, "late", limits=Limits(behind=2)) as made:
        with held(made, "local/late"):
            waiting = [made.batch("local/late", batch, None, "x") for batch in images]
        answers = [future.result()[0] for future in waiting]
    assert [answer["noted"] for answer in answers] == [False, False, False, False, True, True]
    replay = Replay(source_file, "late")
    for batch, answer in zip(images, answers, strict=True):
        assert answer["probabilities"] == replay(batch, learn=answer["noted"])


def test_a_service_that_exceeds_its_time_answers_without_learning(source_file, tmp_path):
    batches = pictures(3, 2)
    for seconds, adapted in ((1e-9, [True, False, False]), (None, [True] * 3)):
        with engine_of(source_file, tmp_path / str(seconds), "a", seconds=seconds) as made:
            assert [send(made, images)["noted"] for images in batches] == adapted


def test_states_too_large_for_the_disk_are_refused(source_file, tmp_path):
    with engine_of(source_file, tmp_path, limits=Limits(disk_bytes=500_000)) as made:
        creations = (made.create("local", f"s{number}").result() for number in range(50))
        with pytest.raises(Refused, match="no room"):
            list(creations)
        names = [stream["name"] for stream in made.journal.describe("local")]
        assert 2 < len(names) < 49
        for name in names:
            made.delete(f"local/{name}").result()
        made.create("local", "again").result()  # deleting made room


def test_waking_streams_parks_others(source_file, tmp_path):
    names = [f"s{number}" for number in range(8)]
    with engine_of(source_file, tmp_path, *names) as made:
        one = made.live.state_bytes
    with engine_of(source_file, tmp_path, limits=Limits(memory_bytes=3 * one)) as made:
        for name in names:
            made.change(f"local/{name}", "freeze").result()
            assert 1 <= len(made.live.hot) <= 6
            assert sum(stream.nbytes for stream in made.live.hot.values()) <= 3 * one


def test_a_rate_limit_fills_again():
    now = [0.0]
    limit = RateLimit(2.0, clock=lambda: now[0])
    for _ in range(4):
        limit.take("a")
    with pytest.raises(Refused) as refused:
        limit.take("a")
    assert 0 < refused.value.retry_after <= 0.5
    limit.take("b")
    now[0] += 0.5
    limit.take("a")


def test_every_owner_has_its_own_rate(source_file, tmp_path):
    """On a clock that stands still, one request a second means two at once."""

    async def talk(asking):
        headers = [{"Authorization": f"Bearer {letter * 20}"} for letter in "aaabbbc"]
        return [(await asking.get("/v1/streams", headers=header)).status_code for header in headers]

    with engine_of(source_file, tmp_path, limits=Limits(requests_per_s=1.0), **CHEAP) as made:
        app = create_app(made, TOKENS)
        assert app.app.admission.rate.per_second == 1.0
        app.app.admission.rate = RateLimit(1.0, clock=lambda: 0.0)
        assert converse(app, talk) == [200, 200, 429, 200, 200, 429, 401]


def test_uploads_are_counted_together_until_they_are_answered(source_file, tmp_path):
    async def talk(asking):
        arrived, proceed = asyncio.Event(), asyncio.Event()

        async def slow():
            yield GOOD[:-1]
            arrived.set()
            await proceed.wait()
            yield GOOD[-1:]

        def post(content):
            return asyncio.create_task(asking.post("/v1/streams/a/batches", content=content, headers=NPY))

        first = post(slow())
        await arrived.wait()
        second = await post(GOOD)
        proceed.set()
        answers = [await first, second, await post(GOOD), await post(GOOD)]
        return [answer.status_code for answer in answers]

    # One batch and its decoded images find room in three quarters of it, and not a second one.
    with engine_of(source_file, tmp_path, "a", limits=Limits(upload_bytes=len(GOOD) * 3), **CHEAP) as made:
        assert converse(create_app(made, Tokens()), talk) == [200, 429, 200, 200]


def test_a_form_is_not_read_beyond_the_allowed_images(source_file, tmp_path):
    read = []

    async def form():
        for number in range(1000):
            read.append(number)
            yield b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\nx\r\n'

    async def talk(asking):
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        return (await asking.post("/v1/streams/a/batches", content=form(), headers=headers)).status_code

    with engine_of(source_file, tmp_path, "a", limits=Limits(images=3), **CHEAP) as made:
        assert converse(create_app(made, Tokens()), talk) == 422
    assert len(read) < 10


def test_an_owner_has_a_limited_number_of_batches_that_are_decoded(monkeypatch):
    async def talk():
        decoder, hold = Decoder(SIDE, Limits(decoding=2)), threading.Event()
        monkeypatch.setattr(uploads, "from_array", lambda *_: hold.wait(60) and np.zeros((1, 3, SIDE, SIDE), np.uint8))

        async def decode(stream):
            with Share(Shares(10**9, "", "uploads"), owner_of(stream)) as share:
                await decoder.decode(GOOD, stream, share)

        both = [asyncio.create_task(decode("anna/a")) for _ in range(2)]
        await asyncio.sleep(0)  # until they have begun
        try:
            with pytest.raises(Refused) as refused:
                await asyncio.wait_for(decode("anna/b"), 10)
            other = asyncio.create_task(decode("bert/a"))
            await asyncio.sleep(0)
        finally:
            hold.set()
        await asyncio.gather(*both, other)
        await decode("anna/a")  # there is room again
        return refused.value.status

    assert asyncio.run(talk()) == 429


def test_pictures_of_a_client_that_has_left_are_not_decoded(source_file, tmp_path, monkeypatch):
    decoded, left = [], threading.Event()

    def decode(files, *_):
        for number in range(len(files)):
            decoded.append(number)
            left.wait(5)
            yield np.zeros((3, SIDE, SIDE), np.uint8)

    async def talk(asking):
        form = [("images", ("a.png", image_file()))] * 8
        sent = asking.build_request("POST", "/v1/streams/a/batches", files=form)
        messages = [{"type": "http.request", "body": sent.read(), "more_body": False}]

        async def receive():
            while not messages and not decoded:
                await asyncio.sleep(0.01)
            return messages.pop() if messages else {"type": "http.disconnect"}

        headers = [(name.lower(), value) for name, value in sent.headers.raw]
        scope = {"type": "http", "method": "POST", "path": sent.url.path, "headers": headers, "query_string": b""}
        await app(scope, receive, lambda message: asyncio.sleep(0))
        left.set()
        return (await asking.post("/v1/streams/a/batches", content=GOOD, headers=NPY)).status_code

    monkeypatch.setattr(uploads, "from_files", decode)
    with engine_of(source_file, tmp_path, "a", **CHEAP) as made:
        app = create_app(made, Tokens())
        assert converse(app, talk) == 200
    assert decoded == [0]


def test_feeds_are_counted_for_each_owner(source_file, tmp_path):
    with engine_of(source_file, tmp_path, limits=Limits(feeds=2), **CHEAP) as made:
        stop = made.feeds.listen("anna/a", print)
        made.feeds.listen("anna/b", print)
        with pytest.raises(Refused) as refused:
            made.feeds.listen("anna/c", print)
        assert refused.value.status == 429
        made.feeds.listen("bert/a", print)
        stop()
        made.feeds.listen("anna/c", print)
