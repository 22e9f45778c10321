"""The service from the inside, in this process: what is answered, flagged, kept and forgotten, and where it ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from safer_tta import api, extensions
from safer_tta.cli import service
from safer_tta.errors import InvalidValueError
from safer_tta.pooling import RULES
from safer_tta.serve.app import create_app
from safer_tta.serve.engine import Engine
from safer_tta.serve.journal import Journal, Stream
from safer_tta.serve.limits import Limits, RateLimit, Refused
from safer_tta.serve.middleware import AccessControl
from safer_tta.serve.tokens import Tokens
from safer_tta.serve.uploads import Decoder
from tests.serve.helpers import SIDE, Replay, array_file, engine, pictures

ANNA, BERT = {"Authorization": "Bearer " + "a" * 20}, {"Authorization": "Bearer " + "b" * 20}
TOKENS = Tokens({"anna": "a" * 20, "bert": "b" * 20})
NPY = {"Content-Type": "application/x-npy"}
GOOD = array_file(np.zeros((1, SIDE, SIDE, 3), np.uint8))
CHEAP = {"method": "none", "predictor": "plain"}  # where the answers do not matter


@contextlib.contextmanager
def running(model: Path, folder: Path, *streams: str, **options: object) -> Iterator[Engine]:
    """An engine with some streams of `local`."""
    made = engine(model, folder, **options)
    try:
        for name in streams:
            if not made.journal.exists(f"local/{name}"):
                made.create("local", name).result()
        yield made
    finally:
        made.stop()


def sent(made: Engine, images: np.ndarray, name: str = "a", key: str | None = None) -> dict:
    return made.batch(f"local/{name}", images, key, str(hash(images.tobytes()))).result()[0]


def test_the_command_serves_what_adapt_recommends():
    defaults = inspect.signature(service.serve).parameters
    assert (defaults["method"].default, defaults["predictor"].default) == (api.DEFAULT_METHOD, api.DEFAULT_PREDICTOR)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_images_above_the_threshold_are_flagged(source_file, tmp_path):
    """Set to the suspicion of one of the images, which is not above itself."""
    (images,) = pictures(1, 8)
    with running(source_file, tmp_path / "first", "a") as made:
        suspicion = sent(made, images)["suspicion"]
    threshold = sorted(suspicion)[4]
    with running(source_file, tmp_path / "second", "a", abstain=threshold) as made:
        answer = sent(made, images)
    assert answer["suspicion"] == suspicion
    assert answer["abstain"] == [value > threshold for value in suspicion]
    assert answer["report"]["abstained"] == sum(answer["abstain"]) > 0


def test_where_suspicion_is_not_estimated_only_broken_answers_are_flagged(source_file, tmp_path):
    (images,) = pictures(1, 3)
    with pytest.raises(InvalidValueError, match=r"abstain is 0.5.*safer-g"):
        engine(source_file, tmp_path, predictor="safer", abstain=0.5)
    with pytest.raises(InvalidValueError, match="abstain is 2"):
        engine(source_file, tmp_path, abstain=2.0)
    with running(source_file, tmp_path, "a", predictor="safer") as made:
        assert made.served.abstain is None
        answer = sent(made, images)
        assert (answer["suspicion"], answer["report"]["suspicion"], answer["abstain"]) == (None, None, [False] * 3)
        made.method.classifier.head.weight.data.fill_(3e38)
        answer = sent(made, images)
    assert (answer["abstain"], answer["probabilities"]) == ([True] * 3, [[None] * 7] * 3)


def test_labels_given_again_take_the_place_of_the_first(source_file, tmp_path):
    with running(source_file, tmp_path, "a", **CHEAP) as made:
        right = sent(made, pictures(1, 4)[0])["labels"]
        wrong = [(label + 1) % 7 for label in right]
        for labels, accuracy in ((wrong, 0), (right, 100), ([*right[:3], wrong[3]], 75), (wrong, 0)):
            assert made.journal.label("local/a", 1, labels)["accuracy"] == accuracy
            (stream,) = made.journal.describe("local")
            assert (stream["accuracy"], stream["labelled"]) == (accuracy, 4)


def test_without_a_seed_nobody_can_guess_the_views(source_file, tmp_path):
    """Neither from another stream nor from the same name in another service."""
    images, seen = pictures(1, 2)[0], set()
    for folder in ("one", "two"):
        with running(source_file, tmp_path / folder, "a", "b", seed=None) as made:
            for name in ("a", "b"):
                seen.add(str([sent(made, images, name)["report"]["views"] for _ in range(3)]))
    assert len(seen) == 4


def test_a_service_that_is_behind_its_seconds_answers_without_learning(source_file, tmp_path):
    batches = pictures(3, 2)
    for seconds, adapted in ((1e-9, [True, False, False]), (None, [True] * 3)):
        with running(source_file, tmp_path / str(seconds), "a", seconds=seconds) as made:
            assert [sent(made, images)["adapted"] for images in batches] == adapted


def test_a_collapse_is_an_alarm_and_a_rollback_by_hand_is_none(source_file, tmp_path):
    """The same picture over and over: one class takes every answer, and after a window of eight the guard acts."""
    black = np.zeros((8, 3, SIDE, SIDE), np.uint8)
    with running(source_file, tmp_path, "a", "b", predictor="plain") as made:
        alarms = [sent(made, black)["report"]["alarm"] for _ in range(8)]
        assert alarms == [""] * 7 + ["rollback, collapse"]
        assert b"safer_tta_alarms_total 1.0" in made.metrics.text()
        sent(made, pictures(1, 2)[0], "b")
        made.change("local/b", "rollback").result()
        report = sent(made, pictures(1, 2)[0], "b")["report"]
        assert (report["alarm"], report["health"].get("rollbacks", 0)) == ("", 0)
        assert b"safer_tta_alarms_total 1.0" in made.metrics.text()


def test_what_prometheus_is_told_has_happened(source_file, tmp_path):
    def counted(made: Engine) -> dict[str, float]:
        lines = [line.split() for line in made.metrics.text().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("safer_tta_"): float(value) for name, value in lines}

    with running(source_file, tmp_path, "a", abstain=0.0) as made:
        assert counted(made)["batches_total"] == 0
        sent(made, pictures(1, 3)[0], key="k")
        sent(made, pictures(1, 3)[0], key="k")  # answered from the journal
        made.change("local/a", "freeze").result()
        sent(made, pictures(1, 2)[0])
        found = counted(made)
    asked = ("batches_total", "images_total", "batches_not_learnt_from_total", "images_abstained_total", "alarms_total")
    assert [found[name] for name in asked] == [2, 5, 1, 5, 0]
    assert found["batch_seconds_count"] == 2


def test_the_version_names_everything_that_decides_an_answer(source_file, tmp_path):
    deciding = [
        {}, {"options": {"lr": 0.01}}, {"method": "bn"}, {"predictor": "plain"}, {"norm": "medbn"},
        {"predictor": {"name": "safer-g", "views": 3}}, {"precision": "bfloat16"}, {"side": 32},
    ]  # fmt: skip
    beside = [
        {"abstain": 0.3},
        {"seconds": 1.0},
        {"seed": 1},
        {"predictor": {"name": "safer-g", "views": 4}},
        {"options": {"lr": 1e-3}},
    ]
    versions = []
    for number, options in enumerate([*deciding, *beside]):
        with running(source_file, tmp_path / str(number), **options) as made:
            versions.append(made.served.version)
    assert len(set(versions[: len(deciding)])) == len(deciding)
    assert set(versions[len(deciding) :]) == {versions[0]}


def test_the_version_names_a_users_own_code(source_file, tmp_path, monkeypatch):
    with running(source_file, tmp_path / "before") as made:
        before = made.served.version
    file = tmp_path / "own_rule.py"
    file.write_text(
        "from safer_tta.pooling import RULES, register\nregister('own-rule')(lambda *views: RULES['cc_drop'](*views))\n"
    )
    monkeypatch.setattr(extensions, "_loaded", {})
    extensions.load([file])
    options = {"predictor": {"name": "safer", "pool": "own-rule"}}
    with running(source_file, tmp_path / "named", **options) as made:
        named = made.served.version
    monkeypatch.setattr(extensions, "_loaded", {})
    with running(source_file, tmp_path / "unnamed", **options) as made:
        assert made.served.version != named
    del RULES["own-rule"]
    with running(source_file, tmp_path / "after") as made:
        assert made.served.version == before


def test_nothing_is_adapted_where_a_method_finds_nothing_to_learn_from(source_file, tmp_path):
    (images,) = pictures(1, 8)
    for margin, adapted in ((1e-9, False), (10, True)):
        with running(source_file, tmp_path / str(adapted), "a", method="eata", options={"margin": margin}) as made:
            answer = sent(made, images)
            assert (answer["adapted"], answer["report"]["adapted"]) == (adapted, adapted)


def test_a_batch_that_the_method_cannot_take_is_the_clients_affair(source_file, tmp_path):
    """One image, of which a layer is left with one value a channel."""
    with running(source_file, tmp_path, "a", predictor="plain", side=8) as made:
        image = np.zeros((1, 3, 8, 8), np.uint8)
        with pytest.raises(Refused, match="at least two images") as refused:
            made.batch("local/a", image, None, "c").result()
        assert refused.value.status == 422
        assert made.describe("local", "a")[0]["state"] == "parked"  # whatever the method got to is thrown away
        assert sent(made, np.zeros((4, 3, 8, 8), np.uint8))["number"] == 1


def test_a_request_that_goes_on_and_on_is_too_large(source_file, tmp_path):
    """Without a word on its length."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    async def talk(app: AccessControl) -> httpx.Response:
        async with asking(app) as client:
            return await client.post("/v1/streams", content=endless(), headers={"Content-Type": "application/json"})

    with running(source_file, tmp_path, **CHEAP) as made:
        answer = asyncio.run(talk(create_app(made, Tokens())))
    assert answer.status_code == 413
    assert "longer than 65536 bytes" in answer.json()["error"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_last_256_answers_are_kept(source_file, tmp_path):
    (image,) = pictures(1, 1)
    with running(source_file, tmp_path, "a", "other", **CHEAP) as made:
        sent(made, image, "other")
        for number in range(1, 260):
            sent(made, image, key=f"k{number}")
        assert [report["number"] for report in made.journal.reports("local/a", 1000)] == list(range(4, 260))
        assert made.journal.answer("local/a", "k3") is None
        assert made.journal.answer("local/a", "k4") is not None
        assert made.journal.label("local/a", 3, [0]) is None
        assert len(made.journal.reports("local/other", 1000)) == 1


def test_the_last_ten_thousand_events_are_kept(tmp_path):
    journal = Journal(tmp_path, "v")
    events = [(float(number), "anna", "a", "freeze") for number in range(10_020)]
    with sqlite3.connect(journal.path) as database:
        insert = "insert into audit (time, owner, stream, what) values (?, ?, ?, ?)"
        database.executemany(insert, [(0.0, "bert", "b", "reset"), *events])
    journal.create(Stream("anna", "new", 0.0, 0.0, {"x": torch.zeros(1)}, 0))
    kept = journal.audit("anna", 100_000)
    assert (len(kept), kept[0]["what"], kept[-1]["time"]) == (10_000, "created", 21.0)
    assert [event["what"] for event in journal.audit("bert")] == ["reset"]  # who is quiet loses nothing to the loud
    journal.close()


def test_a_deleted_stream_leaves_nothing_but_its_audit(source_file, tmp_path):
    batches = pictures(9, 2)
    with running(source_file, tmp_path, "a", "other") as made:
        sent(made, batches[0], "other")
        for number, images in enumerate(batches):
            sent(made, images, key=f"k{number}")
        made.delete("local/a").result()
        with sqlite3.connect(made.journal.path) as database:
            for table, column in (("streams", "id"), ("snapshots", "stream"), ("answers", "stream")):
                assert {row[0] for row in database.execute(f"select {column} from {table}")} <= {"local/other"}
        made.create("local", "a").result()
        assert made.journal.reports("local/a", 100) == []
        assert sent(made, batches[1], key="k0")["number"] == 1  # a key of the old one says nothing


def test_a_restart_forgets_nothing_that_the_guard_knew(source_file, tmp_path):
    """A rollback after it goes to the state it would have gone to."""
    batches = pictures(22, 3)
    replay = Replay(source_file, "a")
    with running(source_file, tmp_path, "a") as made:
        for images in batches[:20]:
            assert sent(made, images)["probabilities"] == replay(images)
    assert replay.guard.memory.healthy
    with running(source_file, tmp_path) as made:
        made.change("local/a", "rollback").result()
        replay.guard.rollback()
        for images in batches[20:]:
            assert sent(made, images)["probabilities"] == replay(images)


def test_a_collapse_is_noticed_over_a_restart(source_file, tmp_path):
    black = np.zeros((8, 3, SIDE, SIDE), np.uint8)
    with running(source_file, tmp_path, "a", predictor="plain") as made:
        assert not any(sent(made, black)["report"]["alarm"] for _ in range(5))
    with running(source_file, tmp_path, predictor="plain") as made:
        assert [sent(made, black)["report"]["alarm"] for _ in range(3)] == ["", "", "rollback, collapse"]


def test_the_disk_is_waited_for(tmp_path):
    """An answer outlives a power cut, which no test can bring about; SQLite says what it waits for (2: full)."""
    journal = Journal(tmp_path, "v")
    assert journal._database.execute("pragma synchronous").fetchone() == (2,)
    journal.close()


# --- where it ends ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asking(app: AccessControl) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
        yield client


def test_a_service_that_stops_is_alive_and_not_ready(source_file, tmp_path):
    async def talk(app: AccessControl, made: Engine) -> list[int]:
        async with asking(app) as client:
            before = await client.get("/readyz")
            made.refuse()
            after = [await client.get(path) for path in ("/readyz", "/healthz")]
            return [answer.status_code for answer in (before, *after)]

    with running(source_file, tmp_path, **CHEAP) as made:
        assert asyncio.run(talk(create_app(made, TOKENS), made)) == [200, 503, 200]


def test_every_owner_has_a_rate_of_his_own(source_file, tmp_path):
    """One request a second and two at once, on a clock that stands still."""

    async def talk(app: AccessControl) -> list[int]:
        async with asking(app) as client:
            headers = [ANNA, ANNA, ANNA, BERT, BERT, BERT, {"Authorization": "Bearer nobody"}]
            return [(await client.get("/v1/streams", headers=header)).status_code for header in headers]

    with running(source_file, tmp_path, limits=Limits(requests_per_s=1.0), **CHEAP) as made:
        app = create_app(made, TOKENS)
        assert app.rate.per_second == 1.0
        app.rate = RateLimit(1.0, clock=lambda: 0.0)
        assert asyncio.run(talk(app)) == [200, 200, 429, 200, 200, 429, 401]


def test_uploads_are_counted_together_until_they_are_answered(source_file, tmp_path):
    """One that holds most of what may arrive at once, another that finds no room, and the same when the first is
    through."""

    async def talk(app: AccessControl) -> list[int]:
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield GOOD[:-1]
            arrived.set()
            await go_on.wait()
            yield GOOD[-1:]

        async with asking(app) as client:

            def send(content: bytes | AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/streams/a/batches", content=content, headers=NPY))

            first = send(slow())
            await arrived.wait()
            second = await send(GOOD)
            go_on.set()
            answers = [await first, second, await send(GOOD), await send(GOOD)]
            return [answer.status_code for answer in answers]

    with running(source_file, tmp_path, "a", limits=Limits(upload_bytes=len(GOOD) * 3 // 2), **CHEAP) as made:
        assert asyncio.run(talk(create_app(made, Tokens()))) == [200, 429, 200, 200]


def test_a_form_is_read_no_further_than_images_are_allowed(source_file, tmp_path):
    read = []

    async def form() -> AsyncIterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\nx\r\n'

    async def talk(app: AccessControl) -> int:
        async with asking(app) as client:
            kind = {"Content-Type": "multipart/form-data; boundary=b"}
            return (await client.post("/v1/streams/a/batches", content=form(), headers=kind)).status_code

    with running(source_file, tmp_path, "a", limits=Limits(images=3), **CHEAP) as made:
        assert asyncio.run(talk(create_app(made, Tokens()))) == 422
    assert len(read) < 10


def test_no_more_is_decoded_at_once_than_is_allowed():
    async def talk() -> list[int]:
        decoder, hold = Decoder(SIDE, Limits(decoding=2)), threading.Event()

        def decode(content: np.ndarray, side: int, limits: Limits) -> np.ndarray:
            hold.wait(60)
            return content

        image = np.zeros((1, 3, SIDE, SIDE), np.uint8)
        both = [asyncio.create_task(decoder.decode(decode, image)) for _ in range(2)]
        await asyncio.sleep(0)  # until they have begun
        try:
            with pytest.raises(Refused) as refused:
                await asyncio.wait_for(decoder.decode(decode, image), 10)
        finally:
            hold.set()
        await asyncio.gather(*both)
        await decoder.decode(decode, image)  # there is room again
        return refused.value.status

    assert asyncio.run(talk()) == 429


def test_feeds_are_counted_for_each_owner(source_file, tmp_path):
    with running(source_file, tmp_path, limits=Limits(feeds=2), **CHEAP) as made:
        stop = made.listen("anna/a", print)
        made.listen("anna/b", print)
        with pytest.raises(Refused) as refused:
            made.listen("anna/c", print)
        assert refused.value.status == 429
        made.listen("bert/a", print)
        stop()
        made.listen("anna/c", print)


def test_a_token_is_compared_to_its_end():
    for number in range(3000):
        with pytest.raises(Refused):
            TOKENS.owner(f"Bearer {'a' * 19}{number}")
    assert [TOKENS.owner(header["Authorization"]) for header in (ANNA, BERT)] == ["anna", "bert"]
