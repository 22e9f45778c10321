import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from safer_tta.client import Client
from safer_tta.serve.limits import Limits
from tests.serve.helpers import SIDE, Replay, engine_of, meanwhile, pictures, send


def test_a_hostile_stream_does_not_touch_the_others(asking, source_file):
    names = ["clean-1", "clean-2"]
    for name in [*names, "hostile"]:
        asking.create(name)

    def attack(stop):
        rng = np.random.default_rng(0)
        with Client(asking.url) as other:
            for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                noise = rng.integers(256, size=(8, SIDE, SIDE, 3), dtype=np.uint8)
                other.send("hostile", (noise, np.zeros_like(noise), np.full_like(noise[:1], 255))[number % 3])
                if number % 5 == 0:
                    other.reset("hostile")

    batches = pictures(10, 4, seed=3)
    given = {name: [] for name in names}
    with meanwhile(attack):
        for images in batches:
            for name in names:
                given[name].append(asking.send(name, images)["probabilities"])
    assert asking.stream("hostile")["batches"] > 5
    for name in names:
        replay = Replay(source_file, name)
        assert given[name] == [replay(images) for images in batches]


def test_many_streams_at_once(server, source_file):
    batches = pictures(3, 2, seed=9)

    def talk(number):
        with Client(server.url, retries=50) as mine:
            mine.create(f"load-{number}")
            return [mine.send(f"load-{number}", images) for images in batches]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(talk, range(64)))
    for number in (0, 31, 63):
        replay = Replay(source_file, f"load-{number}")
        for images, answer in zip(batches, answers[number], strict=True):
            assert answer["probabilities"] == replay(images, learn=answer["noted"])


def test_a_thousand_streams_are_parked_and_come_back(source_file, tmp_path):
    first, second = pictures(2, 2, seed=4)
    names, early = [f"parked-{number:04}" for number in range(1000)], {}
    with engine_of(source_file, tmp_path, limits=Limits(memory_bytes=2**20)) as made:
        for name in names:
            made.create("local", name).result()
            early[name] = send(made, first, name)["probabilities"]
        states = [stream["state"] for stream in made.describe("local")]
        assert len(states) == 1000
        assert states.count("parked") > 900
        for name in names[::50]:
            replay = Replay(source_file, name)
            assert early[name] == replay(first)
            assert send(made, second, name)["probabilities"] == replay(second)
