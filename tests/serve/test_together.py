"""Batches of several streams that wait at the same time are answered by one step, if that is asked for."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from safer_tta.client import Client
from safer_tta.models import statistics
from safer_tta.serve.limits import Limits, Refused
from tests.serve.helpers import Replay, engine_of, pictures, send, serving

LIMITS = Limits(batch_streams=8)
NAMES = [f"n{number}" for number in range(8)]


@pytest.fixture(autouse=True)
def learn_from_few_classes(monkeypatch):
    monkeypatch.setattr(statistics, "LEAST_DIVERSE", 0.0)


@pytest.fixture
def steps(monkeypatch):
    """How many streams took each step."""
    from safer_tta.methods import Lockstep

    taken, step = [], Lockstep.step

    def counted(self, states, *given, **how):
        taken.append(len(states))
        return step(self, states, *given, **how)

    monkeypatch.setattr(Lockstep, "step", counted)
    return taken


@contextlib.contextmanager
def waiting(made):
    """Hold the engine, so that what is sent inside waits together."""
    go = threading.Event()
    made.submit("local/held", go.wait)
    try:
        yield
    finally:
        go.set()


def send_all(made, batches, keys=None):
    """Send a batch of each stream at once; return the futures."""
    keys = dict.fromkeys(batches) if keys is None else keys
    with waiting(made):
        return {
            name: made.batch(f"local/{name}", images, keys[name], str(hash(images.tobytes())))
            for name, images in batches.items()
        }


def answers(futures):
    return {name: future.result(60)[0] for name, future in futures.items()}


def close(given, wanted) -> None:
    np.testing.assert_allclose(np.array(given, float), np.array(wanted, float), rtol=0, atol=1e-5)


def test_streams_that_wait_together_get_what_the_library_gives(source_file, tmp_path, steps):
    replays, rounds = {name: Replay(source_file, name) for name in NAMES}, 4
    with engine_of(source_file, tmp_path, *NAMES, limits=LIMITS) as made:
        for turn in range(rounds):
            batches = {name: pictures(1, 4, seed=10 * turn + n)[0] for n, name in enumerate(NAMES)}
            for name, answer in answers(send_all(made, batches)).items():
                close(answer["probabilities"], replays[name](batches[name]))
                assert answer["number"] == turn + 1
                assert answer["adapted"]
    assert steps == [8] * rounds
    with engine_of(source_file, tmp_path, limits=LIMITS) as made:  # what was learnt is on disk
        images = pictures(1, 4, seed=99)[0]
        for name in NAMES:
            close(send(made, images, name)["probabilities"], replays[name](images))


def test_by_default_every_stream_takes_its_turn_to_the_last_bit(source_file, tmp_path, steps):
    with engine_of(source_file, tmp_path, *NAMES[:3]) as made:
        batches = {name: pictures(1, 4, seed=n)[0] for n, name in enumerate(NAMES[:3])}
        for name, answer in answers(send_all(made, batches)).items():
            assert answer["probabilities"] == Replay(source_file, name)(batches[name])
    assert steps == []


def test_only_batches_of_one_shape_and_mode_are_answered_together(source_file, tmp_path, steps):
    replays = {name: Replay(source_file, name) for name in NAMES}
    sizes = [4, 4, 4, 4, 3, 3, 2]
    batches = {name: pictures(1, size, seed=size)[0] for name, size in zip(NAMES, sizes, strict=False)}
    with engine_of(source_file, tmp_path, *NAMES, limits=LIMITS) as made:
        made.change(f"local/{NAMES[0]}", "freeze").result()
        made.change(f"local/{NAMES[1]}", "freeze").result()
        found = answers(send_all(made, batches))
        for name, images in batches.items():
            replays[name].guard.method.frozen = name in NAMES[:2]
            close(found[name]["probabilities"], replays[name](images))
            assert found[name]["adapted"] is (name not in NAMES[:2])
    assert sorted(steps) == [2, 2, 2]  # frozen, learning, and those of three images


def test_a_stream_keeps_the_order_of_its_batches(source_file, tmp_path):
    replays, sent = {name: Replay(source_file, name) for name in NAMES[:2]}, []
    with engine_of(source_file, tmp_path, *NAMES[:2], limits=LIMITS) as made:
        with waiting(made):
            for seed, size in enumerate((4, 3, 4, 4)):
                for name in NAMES[:2]:
                    images = pictures(1, size, seed=seed)[0]
                    sent.append((name, images, made.batch(f"local/{name}", images, None, "")))
        for name, images, future in sent:
            close(future.result(60)[0]["probabilities"], replays[name](images))


def test_a_step_that_fails_gives_everybody_a_turn(source_file, tmp_path, monkeypatch):
    batches = {name: pictures(1, 4, seed=n)[0] for n, name in enumerate(NAMES[:3])}
    with engine_of(source_file, tmp_path, *NAMES[:3], limits=LIMITS) as made:
        monkeypatch.setattr(made.live.together.lockstep, "step", lambda *given, **how: 1 / 0)
        for name, answer in answers(send_all(made, batches)).items():
            assert answer["probabilities"] == Replay(source_file, name)(batches[name])
            assert answer["number"] == 1


def test_a_write_that_fails_answers_nobody_twice(source_file, tmp_path, monkeypatch):
    """All of a step is written or nothing; then each stream gets a turn of its own."""
    batches = {name: pictures(1, 4, seed=n)[0] for n, name in enumerate(NAMES[:3])}
    with engine_of(source_file, tmp_path, *NAMES[:3], limits=LIMITS) as made:
        commit, calls = made.journal.commit_many, itertools.count()

        def fail_once(given):
            if next(calls) == 0:
                commit(itertools.chain(list(given)[:2], iter(lambda: 1 / 0, None)))
            commit(given)

        monkeypatch.setattr(made.journal, "commit_many", fail_once)
        for name, answer in answers(send_all(made, batches)).items():
            assert answer["probabilities"] == Replay(source_file, name)(batches[name])
            assert made.describe("local", name)[0]["batches"] == 1


def test_what_is_wrong_with_one_batch_is_its_own(source_file, tmp_path):
    """A stream that is missing, a key that was used, a state that is not finite: the others do not notice."""
    batches = {name: pictures(1, 4, seed=n)[0] for n, name in enumerate(NAMES[:5])}
    keys = dict.fromkeys(NAMES[:5]) | {"n1": "k", "n2": "k"}
    with engine_of(source_file, tmp_path, *NAMES[:4], limits=LIMITS) as made:
        first = send(made, batches["n1"], "n1", key="k")
        send(made, pictures(1, 4, seed=50)[0], "n2", key="k")
        made.live.hot["local/n3"].state = {
            name: tensor * torch.nan if tensor.is_floating_point() else tensor
            for name, tensor in made.live.hot["local/n3"].state.items()
        }
        found = send_all(made, batches, keys)
        close(found["n0"].result(60)[0]["probabilities"], Replay(source_file, "n0")(batches["n0"]))
        assert found["n1"].result(60) == (first, True)
        for name, status in (("n2", 409), ("n4", 404)):
            with pytest.raises(Refused) as refused:
                found[name].result(60)
            assert refused.value.status == status
        assert "rollback" in found["n3"].result(60)[0]["report"]["alarm"]
        assert send(made, batches["n4"], "n3")["report"]["alarm"] == ""


def test_a_collapse_of_one_stream_rolls_back_that_one(source_file, tmp_path, steps):
    black = np.zeros((8, 3, 64, 64), np.uint8)
    with engine_of(source_file, tmp_path, "a", "b", limits=LIMITS, predictor="plain") as made:
        told = []
        for turn in range(8):
            found = answers(send_all(made, {"a": black, "b": pictures(1, 8, seed=turn)[0]}))
            told.append((found["a"]["report"]["alarm"], found["b"]["report"]["alarm"]))
        assert told == [("", "")] * 7 + [("rollback, collapse", "")]
        images, replay = pictures(1, 8, seed=9)[0], Replay(source_file, "b", predictor="plain")
        for turn in range(8):
            replay(pictures(1, 8, seed=turn)[0])
        close(send(made, images, "b")["probabilities"], replay(images))
    assert steps == [2] * 8


def test_a_method_that_cannot_do_so_takes_turns(source_file, tmp_path, caplog, steps):
    with engine_of(source_file, tmp_path, "a", "b", limits=LIMITS, method="eata") as made:
        assert "streams take turns" in caplog.text
        answers(send_all(made, {name: pictures(1, 4)[0] for name in "ab"}))
    assert steps == []


@pytest.mark.timeout(300)
def test_killed_again_and_again_nothing_is_lost_or_doubled(source_file, tmp_path, monkeypatch):
    """And the library gives the same answers in the same order."""
    monkeypatch.undo()  # the server is a process of its own
    batches = {name: pictures(6, 4, seed=n) for n, name in enumerate(NAMES[:4])}
    with serving(source_file, tmp_path / "served", "--batch-streams", "4", "--rate", "100000") as server:
        with Client(server.url, retries=200) as client:
            for name in batches:
                client.create(name)

        def talk(name):
            with Client(server.url, retries=1000) as mine:
                return [mine.send(name, images, key=f"{name}-{n}") for n, images in enumerate(batches[name])]

        with ThreadPoolExecutor(4) as pool:
            talks = {name: pool.submit(talk, name) for name in batches}
            for _ in range(3):
                threading.Event().wait(0.7)
                server.kill()
                server.start()
            given = {name: talk.result(200) for name, talk in talks.items()}
        with Client(server.url) as client:
            assert [client.stream(name)["batches"] for name in batches] == [6] * 4
    for name, sent in given.items():
        assert [answer["number"] for answer in sent] == [1, 2, 3, 4, 5, 6]
        replay = Replay(source_file, name)
        for images, answer in zip(batches[name], sent, strict=True):
            close(answer["probabilities"], replay(images, learn=answer["noted"]))
