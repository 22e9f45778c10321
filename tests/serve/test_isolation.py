"""Streams do not touch each other, whatever one of them receives and however many there are."""

from __future__ import annotations

import threading

import numpy as np

from safer_tta.client import Client
from safer_tta.serve.limits import Limits
from tests.serve.helpers import SIDE, Replay, client, engine_of, pictures, send


def test_a_hostile_stream_does_not_touch_the_others(asking, source_file):
    """One stream gets noise and constant images. Two others are answered to the last bit as if it did not exist."""
    names = ["clean-1", "clean-2"]
    for name in [*names, "hostile"]:
        asking.create(name)
    stop = threading.Event()

    def attack() -> None:
        rng = np.random.default_rng(0)
        kinds = [
            lambda: rng.integers(256, size=(8, SIDE, SIDE, 3), dtype=np.uint8),
            lambda: np.zeros((8, SIDE, SIDE, 3), np.uint8),
            lambda: np.full((1, SIDE, SIDE, 3), 255, np.uint8),
        ]
        with Client(asking.url) as other:
            for number in range(100_000):
                if stop.is_set():
                    return
                other.send("hostile", kinds[number % 3]())
                if number % 5 == 0:
                    other.reset("hostile")

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    batches = pictures(10, 4, seed=3)
    given = {name: [] for name in names}
    for images in batches:
        for name in names:
            given[name].append(asking.send(name, images)["probabilities"])
    stop.set()
    thread.join(30)
    assert asking.stream("hostile")["batches"] > 5
    for name in names:
        replay = Replay(source_file, name)
        assert given[name] == [replay(images) for images in batches]


def test_many_streams_at_once(server, source_file):
    """Sixty-four streams ask at the same time."""
    batches = pictures(3, 2, seed=9)
    answers: dict[str, list] = {}

    def talk(name: str) -> None:
        with client(server, retries=50) as mine:
            mine.create(name)
            answers[name] = [mine.send(name, images) for images in batches]

    threads = [threading.Thread(target=talk, args=(f"load-{number}",)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(answers) == 64
    for name in ("load-0", "load-31", "load-63"):
        replay = Replay(source_file, name)
        for images, answer in zip(batches, answers[name], strict=True):
            assert answer["probabilities"] == replay(images, learn=answer["adapted"])


def test_a_thousand_streams_are_parked_and_come_back(source_file, tmp_path):
    """There is room for a few in memory; every tenth stream learns before it is parked."""
    first, second = pictures(2, 2, seed=4)
    names, early = [f"parked-{number:04}" for number in range(1000)], {}
    with engine_of(source_file, tmp_path, limits=Limits(memory_bytes=2**20)) as made:
        for number, name in enumerate(names):
            made.create("local", name).result()
            if number % 10 == 0:
                early[name] = send(made, first, name)["probabilities"]
        states = [stream["state"] for stream in made.describe("local")]
        assert len(states) == 1000
        assert states.count("parked") > 900
        for name in names[::50]:
            replay = Replay(source_file, name)
            assert early[name] == replay(first)
            assert send(made, second, name)["probabilities"] == replay(second)
