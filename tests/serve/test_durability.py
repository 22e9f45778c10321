"""What was answered is kept over kills, stops, restarts, full disks and damaged files."""

from __future__ import annotations

import random
import sqlite3
import threading
import time

import httpx
import numpy as np
import pytest

from safer_tta.client import Client, ServiceError
from safer_tta.errors import InvalidValueError, JournalError, TensorFileError
from safer_tta.serve.limits import Limits
from tests.serve.helpers import NPY, SIDE, Replay, array_file, client, engine, engine_of, pictures, send, serving

KILLS = 30


def test_kills_lose_and_double_nothing(source_file, tmp_path):
    """Kill the service at random moments under load: every batch is in its stream once, in order."""
    batches, stop = pictures(30, 2, seed=7), threading.Event()
    given = {name: [] for name in ("one", "two", "three")}

    def talk(url: str, name: str) -> None:
        with Client(url, retries=0) as mine:
            insist(lambda: mine.create(name))
            while len(given[name]) < len(batches) or not stop.is_set():
                number = len(given[name])
                images = batches[number % len(batches)]
                given[name].append(insist(lambda n=number, x=images: mine.send(name, x, key=f"{name}-{n}")))
                time.sleep(0.02)

    with serving(source_file, tmp_path / "served", "--rate", "100000") as server:
        threads = [threading.Thread(target=talk, args=(server.url, name), daemon=True) for name in given]
        for thread in threads:
            thread.start()
        rng = random.Random(0)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.05, 0.4))
            server.kill()
            server.start()
        stop.set()
        for thread in threads:
            thread.join(60)
        with client(server) as asking:
            for name, answers in given.items():
                assert asking.stream(name)["batches"] == len(answers) >= len(batches)
                replay = Replay(source_file, name)
                for number, answer in enumerate(answers):
                    images = batches[number % len(batches)]
                    assert answer["probabilities"] == replay(images, learn=answer["adapted"])


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


def test_a_stream_continues_after_a_stop(source_file, tmp_path):
    images, more = pictures(2, 3)
    with serving(source_file, tmp_path / "served") as server:
        with client(server) as asking:
            asking.create("again")
            before = asking.send("again", images)["probabilities"]
        assert server.stop() == 0
        server.start()
        with client(server) as asking:
            replay = Replay(source_file, "again")
            assert before == replay(images)
            assert asking.send("again", more)["probabilities"] == replay(more)


def test_a_stop_under_load_answers_all_requests(source_file, tmp_path):
    """Waiting requests are told to come back, the feed ends, and the process leaves without a complaint."""
    with serving(source_file, tmp_path / "served", "--rate", "100000") as server:
        with client(server) as asking:
            asking.create("load")
        ended, answers = threading.Event(), []

        def follow() -> None:
            with Client(server.url, retries=0) as other:
                for _ in other.follow("load"):
                    pass
            ended.set()

        def post() -> None:
            content = array_file(np.zeros((64, SIDE, SIDE, 3), np.uint8))
            answers.append(
                httpx.post(f"{server.url}/v1/streams/load/batches", content=content, headers=NPY, timeout=60)
            )

        threads = [threading.Thread(target=work, daemon=True) for work in [follow, *[post] * 12]]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        assert server.stop() == 0
        for thread in threads:
            thread.join(30)
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
    assert answer["number"] == 2
    assert answer["probabilities"] == replay(more)


def test_a_restart_forgets_nothing_of_the_guard(source_file, tmp_path):
    """A rollback after it restores the state that it would have restored without it."""
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


def test_a_folder_of_another_method_or_damaged_is_refused(source_file, tmp_path):
    engine(source_file, tmp_path / "a").stop()
    with pytest.raises(JournalError, match="another model or method"):
        engine(source_file, tmp_path / "a", method="bn")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "streams.sqlite").write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(JournalError, match="damaged"):
        engine(source_file, tmp_path / "b")


def test_a_folder_belongs_to_one_service(source_file, tmp_path):
    """Two would write over each other's streams."""
    with engine_of(source_file, tmp_path), pytest.raises(JournalError, match="in use by another"):
        engine(source_file, tmp_path)
    engine(source_file, tmp_path).stop()


def test_a_start_that_failed_releases_the_folder(source_file, tmp_path):
    with pytest.raises(InvalidValueError, match="adapts less") as refused:
        engine(source_file, tmp_path, method="pl", limits=Limits(memory_bytes=10_000))
    engine(source_file, tmp_path).stop()
    with pytest.raises(JournalError, match="another model or method") as also_refused:
        engine(source_file, tmp_path, method="bn")
    engine(source_file, tmp_path).stop()
    assert refused.value is not also_refused.value  # both still exist: no garbage collection released the folder


def damage(folder, changes):
    with sqlite3.connect(folder / "streams.sqlite") as database:
        database.execute(f"update streams set {changes}", [b"12345678 nonsense"])


def test_a_damaged_stream_can_be_deleted(source_file, tmp_path):
    with engine_of(source_file, tmp_path, "bad"):
        pass
    damage(tmp_path, "state = ?, guard = '{'")
    with engine_of(source_file, tmp_path) as made:
        assert [stream["name"] for stream in made.journal.describe("local")] == ["bad"]
        made.delete("local/bad").result()
        made.create("local", "bad").result()
        assert send(made, pictures(1, 2)[0], "bad")["number"] == 1


def test_a_damaged_state_is_an_error_of_its_stream_only(source_file, tmp_path):
    with engine_of(source_file, tmp_path, "bad", "good"):
        pass
    damage(tmp_path, "state = ? where name = 'bad'")
    (images,) = pictures(1, 2)
    with engine_of(source_file, tmp_path) as made:
        with pytest.raises(TensorFileError):
            send(made, images, "bad")
        assert send(made, images, "good")["number"] == 1
