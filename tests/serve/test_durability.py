import functools
import random
import sqlite3
import threading
import time

import httpx
import numpy as np
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.errors import DamagedStreamError, InvalidValueError, JournalError
from safer_tta.serve.limits import Limits
from tests.serve.helpers import NPY, SIDE, Replay, array_file, engine, engine_of, meanwhile, pictures, send, serving

KILLS = 30


def test_kills_lose_and_double_nothing(source_file, tmp_path):
    batches = pictures(30, 2, seed=7)
    given = {name: [] for name in ("one", "two", "three")}

    def talk(name, stop):
        with Client(server.url, retries=0) as mine:
            insist(lambda: mine.create(name))
            while len(given[name]) < len(batches) or not stop.is_set():
                number = len(given[name])
                images = batches[number % len(batches)]
                given[name].append(insist(lambda n=number, x=images: mine.send(name, x, key=f"{name}-{n}")))
                time.sleep(0.02)

    with serving(source_file, tmp_path / "served", "--rate", "100000") as server:
        rng = random.Random(0)
        with meanwhile(*(functools.partial(talk, name) for name in given)):
            for _ in range(KILLS):
                time.sleep(rng.uniform(0.05, 0.4))
                server.kill()
                server.start()
        with Client(server.url) as asking:
            for name, answers in given.items():
                assert asking.stream(name)["batches"] == len(answers) >= len(batches)
                replay = Replay(source_file, name)
                for number, answer in enumerate(answers):
                    images = batches[number % len(batches)]
                    assert answer["probabilities"] == replay(images, learn=answer["noted"])


def insist(ask):
    """Ask until the service answers; a stream that was created just before a kill exists already."""
    while True:
        try:
            return ask()
        except ServiceError as error:
            if error.status == 409 and "already" in str(error):
                return None
            if error.status not in (0, 429, 503):
                raise
            time.sleep(0.01)


def test_a_stop_under_load_answers_all_requests(source_file, tmp_path):
    """Waiting requests are told to come back, the feed ends, and the process leaves without a complaint."""
    with serving(source_file, tmp_path / "served", "--rate", "100000") as server:
        with Client(server.url) as asking:
            asking.create("load")
        ended, answers = threading.Event(), []

        def follow(_):
            with Client(server.url, retries=0) as other:
                list(other.follow("load"))
            ended.set()

        def post(_):
            content, address = array_file(np.zeros((64, SIDE, SIDE, 3), np.uint8)), "/v1/streams/load/batches"
            answers.append(httpx.post(server.url + address, content=content, headers=NPY, timeout=60))

        with meanwhile(follow, *[post] * 12):
            time.sleep(1.0)
            assert server.stop() == 0
        assert ended.is_set()
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert len(answers) == 12
        assert "Traceback" not in server.log.read_text()
        assert "timeout graceful shutdown exceeded" not in server.log.read_text()  # no connection was cut off


def test_what_cannot_be_written_is_not_answered_and_changes_nothing(source_file, tmp_path, monkeypatch):
    images, more = pictures(2, 3)

    def full(*arguments):
        raise sqlite3.OperationalError("database or disk is full")

    with engine_of(source_file, tmp_path, "full") as made:
        first = send(made, images, "full")
        with monkeypatch.context() as patch:
            patch.setattr(made.journal, "commit", full)
            with pytest.raises(sqlite3.OperationalError):
                send(made, more, "full")
        answer = send(made, more, "full")
    replay = Replay(source_file, "full")
    assert first["probabilities"] == replay(images)
    assert (answer["number"], answer["probabilities"]) == (2, replay(more))


def test_a_restart_forgets_nothing_of_the_guard(source_file, tmp_path):
    batches, replay = pictures(22, 3), Replay(source_file, "a")
    with engine_of(source_file, tmp_path, "a") as made:
        for images in batches[:20]:
            assert send(made, images)["probabilities"] == replay(images)
    assert replay.guard.memory.healthy
    with engine_of(source_file, tmp_path) as made:
        made.change("local/a", "rollback").result()
        replay.guard.rollback()
        for images in batches[20:]:
            assert send(made, images)["probabilities"] == replay(images)


def test_a_collapse_is_noticed_over_a_restart(source_file, tmp_path):
    black = np.zeros((8, 3, SIDE, SIDE), np.uint8)
    with engine_of(source_file, tmp_path, "a", predictor="plain") as made:
        assert not any(send(made, black)["report"]["alarm"] for _ in range(5))
    with engine_of(source_file, tmp_path, predictor="plain") as made:
        assert [send(made, black)["report"]["alarm"] for _ in range(3)] == ["", "", "rollback, collapse"]


def test_a_folder_that_is_in_use_or_damaged_is_refused(source_file, tmp_path):
    with engine_of(source_file, tmp_path), pytest.raises(JournalError, match="in use by another"):
        engine(source_file, tmp_path)
    engine(source_file, tmp_path).stop()
    (tmp_path / "streams.sqlite").write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(JournalError, match="damaged"):
        engine(source_file, tmp_path)


def test_a_start_that_failed_releases_the_folder(source_file, tmp_path):
    with pytest.raises(InvalidValueError, match="adapts less") as refused:
        engine(source_file, tmp_path, method="pl", limits=Limits(memory_bytes=10_000))
    engine(source_file, tmp_path).stop()
    with pytest.raises(JournalError, match="another model or method") as also_refused:
        engine(source_file, tmp_path, method="bn")
    engine(source_file, tmp_path).stop()
    assert refused.value is not also_refused.value  # both still exist: no garbage collection released the folder


def test_a_damaged_stream_fails_only_itself_and_can_be_deleted(source_file, tmp_path):
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path, "bad", "good", "worse"):
        pass
    with sqlite3.connect(tmp_path / "streams.sqlite") as database:
        database.execute("update states set state = ? where stream != 'local/good'", [b"12345678 nonsense"])
        database.execute("update states set guard = '{' where stream = 'local/worse'")
    with engine_of(source_file, tmp_path) as made:
        with pytest.raises(DamagedStreamError):
            send(made, images, "bad")
        assert send(made, images, "good")["number"] == 1
        assert [stream["name"] for stream in made.journal.describe("local")] == ["bad", "good", "worse"]
        for name in ("bad", "worse"):
            made.delete(f"local/{name}").result()
            made.create("local", name).result()
            assert send(made, images, name)["number"] == 1
