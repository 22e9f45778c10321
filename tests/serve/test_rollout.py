"""A new model is rolled out: it sees every batch as a shadow, then it answers."""

import contextlib
import dataclasses
import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from safer_tta.errors import InvalidValueError, JournalError, StorageError
from safer_tta.serve.journal import backup, check, restore
from safer_tta.serve.limits import Limits, Refused
from tests.serve.helpers import CHEAP, Replay, engine, engine_of, pictures, send

PLAIN = {"predictor": "plain"}


def settled(made, batches):
    """Wait until the shadow has dealt with so many batches, and return the comparison."""
    deadline = time.monotonic() + 60
    while sum((found := made.rollout())["counts"][how] for how in ("batches", "missed", "failed")) < batches:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def switch(made, to=None):
    return made.switch(to or made.shadow.lender.version, "local").result()


def test_the_live_model_answers_as_without_a_shadow(source_file, new_file, tmp_path):
    batches = pictures(6, 3)
    with engine_of(source_file, tmp_path / "alone", "a") as made:
        alone = [send(made, images) for images in batches]
    with engine_of(source_file, tmp_path / "both", "a", shadow=new_file) as made:
        both = [send(made, images) for images in batches[:4]]
        settled(made, 4)
        both += [send(made, images) for images in batches[4:]]
    for one, other in zip(alone, both, strict=True):
        for field in ("labels", "probabilities", "suspicion", "weights", "number", "model", "adapted"):
            assert one[field] == other[field]


def test_the_shadow_learns_what_the_library_would_and_answers_after_the_switch(source_file, new_file, tmp_path):
    """Learning, frozen and again learning; then the other way round, and back."""
    batches, replays = pictures(7, 3), [Replay(file, "a", **PLAIN) for file in (source_file, new_file)]
    with engine_of(source_file, tmp_path, "a", shadow=new_file, **PLAIN) as made:
        old, new = made.live.version, made.shadow.lender.version
        answers, seen = [], []
        for number, images in enumerate(batches[:4]):
            made.change("local/a", "freeze" if number == 2 else "unfreeze").result()
            answers.append(send(made, images, key=f"k{number}"))
            for replay, given in zip(replays, (answers[-1]["probabilities"], None), strict=True):
                replay.guard.method.frozen = number == 2
                probs = replay(images)
                assert given is None or given == probs
            seen.append(np.argmax(probs, axis=1).tolist())
        found = settled(made, 4)
        assert (found["live"]["version"], found["shadow"]["version"]) == (old, new)
        same = int((np.array([answer["labels"] for answer in answers]) == np.array(seen)).sum())
        assert (found["counts"]["same"], found["agreement"]) == (same, same / 12)
        state = made.journal.load("local/a", version=new).state
        expected = replays[1].guard.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert (switch(made), switch(made, new), made.served.version) == (True, False, new)
        assert send(made, batches[0], key="k0") == answers[0]  # a key outlives the switch
        answer = send(made, batches[4])
        assert (answer["number"], answer["model"], answer["probabilities"]) == (5, new, replays[1](batches[4]))
        replays[0](batches[4])
        settled(made, 5)
        assert switch(made, old)
        answer = send(made, batches[5])
        assert (answer["number"], answer["model"], answer["probabilities"]) == (6, old, replays[0](batches[5]))
    assert check(tmp_path).intact


def test_a_stream_that_the_new_model_has_not_seen_starts_from_its_source(source_file, new_file, tmp_path):
    batches = pictures(2, 3)
    with engine_of(source_file, tmp_path, "a", "b", **PLAIN) as made:
        send(made, batches[0])
    with engine_of(source_file, tmp_path, shadow=new_file, **PLAIN) as made:
        switch(made)
        assert made.describe("local", "a")[0]["health"]["batches"] == 0
        for name, number in (("a", 2), ("b", 1)):
            answer = send(made, batches[1], name)
            assert (answer["number"], answer["probabilities"]) == (number, Replay(new_file, name, **PLAIN)(batches[1]))


def test_the_folder_says_which_model_is_live(source_file, new_file, tmp_path, caplog):
    images = pictures(1, 2)[0]
    with engine_of(source_file, tmp_path, "a", shadow=new_file, **PLAIN) as made:
        old, new = made.live.version, made.shadow.lender.version
        send(made, images)
        settled(made, 1)
        switch(made)
    for first, second in ((source_file, new_file), (new_file, source_file)):
        with engine_of(first, tmp_path, shadow=second, **PLAIN) as made:
            found = made.rollout()
            assert (made.served.version, found["shadow"]["version"]) == (new, old)
            assert (found["live"]["model"], found["counts"]["batches"]) == ("new.safetensors", 1)
    with pytest.raises(JournalError, match=r"its shadow.*safer serve switch"):
        engine(source_file, tmp_path, **PLAIN)
    with engine_of(new_file, tmp_path, **PLAIN) as made:
        assert "roll-out of version" in caplog.text
        with pytest.raises(Refused, match="--shadow"):
            made.rollout()
        with pytest.raises(Refused, match="--shadow"):
            switch(made, old)
        assert made.journal.nbytes_of("local") > 0
    with pytest.raises(JournalError, match="--model OLD --shadow NEW"):
        engine(source_file, tmp_path, **PLAIN)
    with closing(sqlite3.connect(tmp_path / "streams.sqlite")) as database:
        for table in ("states", "snapshots", "versions"):
            assert {row[0] for row in database.execute(f"select version from {table}")} <= {new}
        assert database.execute("select count(*) from shadowed").fetchone() == (0,)
    with engine_of(new_file, tmp_path, shadow=source_file, **PLAIN) as made:
        assert made.rollout()["counts"]["batches"] == 0
        assert send(made, images)["number"] == 2
        assert settled(made, 1)["counts"]["failed"] == 0


@pytest.mark.parametrize("what", ["classes", "side", "resize"])
def test_a_shadow_whose_answers_cannot_be_compared_is_refused(what, source_file, new_file, tmp_path, monkeypatch):
    from safer_tta.serve.server import Service

    load = Service.load
    change = {"classes": ("x", "y"), "side": 32, "resize": "crop"}[what]

    def other(service):
        model = load(service)
        served = dataclasses.replace(model.served, **({what: change} if service.model == new_file else {}))
        return dataclasses.replace(model, served=served)

    monkeypatch.setattr(Service, "load", other)
    with pytest.raises(InvalidValueError, match=f"the {what} of the shadow"):
        engine(source_file, tmp_path, shadow=new_file, **CHEAP)
    assert not (tmp_path / "streams.sqlite").exists()


def test_a_shadow_that_is_the_same_model_is_refused(source_file, tmp_path):
    with pytest.raises(InvalidValueError, match="the same model"):
        engine(source_file, tmp_path, shadow=source_file, **CHEAP)


def test_labels_score_both_models_whenever_they_come(source_file, new_file, tmp_path):
    """Before the shadow has answered, afterwards, a second time, and after a switch."""
    batches = pictures(3, 4)
    with engine_of(source_file, tmp_path, "a", shadow=new_file, **CHEAP) as made:
        live = [send(made, images)["labels"] for images in batches]
        settled(made, 3)
        replay = Replay(new_file, "a", **CHEAP)
        shadow = [np.argmax(replay(images), axis=1).tolist() for images in batches]
        truth = [[*labels[:2], *((label + 1) % 7 for label in labels[2:])] for labels in shadow]

        def right(given, batches):
            return sum(a == b for n in batches for a, b in zip(given[n], truth[n], strict=True))

        made.journal.label("local/a", 1, [(label + 3) % 7 for label in truth[0]])
        for _ in range(2):
            made.journal.label("local/a", 1, truth[0])
            counts = made.rollout()["counts"]
            assert (counts["labelled"], counts["live_right"], counts["shadow_right"]) == (4, right(live, [0]), 2)
        before = made.rollout()["seconds"]
        switch(made)
        assert made.rollout()["seconds"] == {"live": before["shadow"], "shadow": before["live"]}
        made.journal.label("local/a", 2, truth[1])  # answered before the switch
        counts = made.rollout()["counts"]
        assert (counts["labelled"], counts["live_right"], counts["shadow_right"]) == (8, 4, right(live, [0, 1]))
        assert made.rollout()["accuracy"]["live"] == 50.0
        with held(made):
            answer = send(made, batches[0])
            made.journal.label("local/a", answer["number"], answer["labels"])
            assert made.rollout()["counts"]["labelled"] == 8
        made.change("local/a", "unfreeze").result()
        assert settled(made, 4)["counts"]["labelled"] == 12
        assert made.rollout()["counts"]["live_right"] == 8


def states_of(folder):
    with closing(sqlite3.connect(folder / "streams.sqlite")) as database:
        return sorted(database.execute("select stream, version from states").fetchall())


def test_a_reset_and_a_deletion_concern_both_models_and_a_rollback_one(source_file, new_file, tmp_path):
    batches = pictures(3, 3)
    with engine_of(source_file, tmp_path, "a", "b", shadow=new_file, **PLAIN) as made:
        old, new = made.live.version, made.shadow.lender.version
        for name in ("a", "b"):
            send(made, batches[0], name)
        settled(made, 2)
        before = made.journal.load("local/a", version=new).state
        made.change("local/a", "rollback").result()
        after = made.journal.load("local/a", version=new).state
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
        made.change("local/a", "reset").result()
        made.delete("local/b").result()
        assert states_of(tmp_path) == [("local/a", old)]
        send(made, batches[1])
        settled(made, 3)
        state, replay = made.journal.load("local/a", version=new).state, Replay(new_file, "a", **PLAIN)
        replay(batches[1])
        assert all(torch.equal(state[name], tensor) for name, tensor in replay.guard.state_dict().items())
        with held(made):
            send(made, batches[2])
            made.change("local/a", "reset").result()
        assert settled(made, 4)["counts"]["missed"] == 1
        assert made.rollout()["waiting"] == 0
    assert check(tmp_path).intact


@contextlib.contextmanager
def held(made):
    """Keep the shadow from working."""
    shadow = made.shadow
    shadow.work = lambda: False
    yield
    del shadow.work


@pytest.mark.parametrize("limits", [{"shadow_queue": 2}, {"shadow_bytes": 2 * 3 * 64 * 64 * 2}])
def test_what_waits_for_the_shadow_is_bounded_and_the_oldest_is_missed(limits, source_file, new_file, tmp_path):
    batches = pictures(6, 2)
    with engine_of(source_file, tmp_path, "a", shadow=new_file, limits=Limits(**limits), **CHEAP) as made:
        with held(made):
            for images in batches[:5]:
                send(made, images)
            found = made.rollout()
            assert (found["counts"]["missed"], found["waiting"]) == (3, 2)
        send(made, batches[5])
        found = settled(made, 6)
        counts = made.metrics.shadow_batches
        assert [counts.labels(how)._value.get() for how in ("answered", "missed", "failed")] == [2, 4, 0]
        with held(made):
            send(made, batches[0])
            switch(made)  # what waits then is missed too
            assert made.rollout()["counts"]["missed"] == 5
            send(made, batches[0])
    with engine_of(source_file, tmp_path, shadow=new_file, **CHEAP) as made:
        assert made.rollout()["counts"]["missed"] == 6


def test_the_shadow_may_fail_in_any_way_and_answers_stay(source_file, new_file, tmp_path, monkeypatch, caplog):
    batches, replay = pictures(5, 2), Replay(source_file, "a", **PLAIN)

    def broken(error):
        def fail(*_, **__):
            raise error

        return fail

    with engine_of(source_file, tmp_path, "a", shadow=new_file, **PLAIN) as made:
        ways = [
            (made.shadow.lender, "answer", RuntimeError("CUDA out of memory")),
            (made.journal, "note_shadow", StorageError("the disk is full")),
            (made.shadow.lender, "stream", sqlite3.DatabaseError("malformed")),
        ]
        for number, (of, name, error) in enumerate(ways):
            with monkeypatch.context() as patch:
                patch.setattr(of, name, broken(error))
                assert send(made, batches[number])["probabilities"] == replay(batches[number])
                found = settled(made, number + 1)
            assert (found["counts"]["failed"], str(error) in caplog.text) == (number + 1, True)
        assert send(made, batches[3])["probabilities"] == replay(batches[3])
        assert settled(made, 4)["counts"]["batches"] == 1


def test_damage_of_the_state_for_the_shadow_leaves_the_live_one_alone(source_file, new_file, tmp_path):
    batches, replay = pictures(3, 2), Replay(source_file, "a", **PLAIN)
    with engine_of(source_file, tmp_path / "served", "a", shadow=new_file, **PLAIN) as made:
        assert send(made, batches[0])["probabilities"] == replay(batches[0])
        settled(made, 1)
        new = made.shadow.lender.version
    with closing(sqlite3.connect(tmp_path / "served" / "streams.sqlite")) as database, database:
        database.execute("update states set state = zeroblob(9) where version = ?", [new])
    found = check(tmp_path / "served")
    assert (found.damaged, list(found.shadows), found.intact) == ({}, ["local/a"], False)
    assert "shadow's state of stream local/a" in str(list(found.problems()))
    with engine_of(source_file, tmp_path / "served", shadow=new_file, **PLAIN) as made:
        assert send(made, batches[1])["probabilities"] == replay(batches[1])
        assert settled(made, 2)["counts"]["failed"] == 1
        assert (made.journal.damaged, made.describe("local")[0]["state"]) == ({}, "hot")
        switch(made)
        assert list(made.journal.damaged) == ["local/a"]
        with pytest.raises(JournalError, match="Reset the stream"):
            send(made, batches[2])
        made.change("local/a", "reset").result()
        answer = send(made, batches[2])
        assert (answer["number"], answer["probabilities"]) == (3, Replay(new_file, "a", **PLAIN)(batches[2]))
        assert settled(made, 3)["counts"]["failed"] == 1
    assert check(tmp_path / "served").intact


def test_a_backup_has_both_models(source_file, new_file, tmp_path):
    batches = pictures(2, 2)
    with engine_of(source_file, tmp_path / "served", "a", shadow=new_file, **PLAIN) as made:
        old, new = made.live.version, made.shadow.lender.version
        send(made, batches[0])
        settled(made, 1)
        switch(made)
        assert backup(tmp_path / "served", tmp_path / "backup").intact
    assert restore(tmp_path / "backup", tmp_path / "again").intact
    assert states_of(tmp_path / "again") == sorted([("local/a", old), ("local/a", new)])
    with engine_of(source_file, tmp_path / "again", shadow=new_file, **PLAIN) as made:
        replay = Replay(new_file, "a", **PLAIN)
        replay(batches[0])
        assert send(made, batches[1])["probabilities"] == replay(batches[1])


def test_the_states_of_the_shadow_do_not_count_for_an_owner(source_file, new_file, tmp_path):
    images = pictures(1, 2)[0]
    with engine_of(source_file, tmp_path / "alone", "a", **PLAIN) as made:
        send(made, images)
        alone, whole = made.journal.nbytes_of("local"), made.journal.nbytes()
    with engine_of(source_file, tmp_path / "both", "a", shadow=new_file, **PLAIN) as made:
        send(made, images)
        settled(made, 1)
        assert abs(made.journal.nbytes_of("local") - alone) < 200  # times in the answer differ in length
        assert made.journal.nbytes() > whole + 10_000


def test_damage_of_the_roles_is_said(source_file, new_file, tmp_path):
    engine(source_file, tmp_path, shadow=new_file, **CHEAP).stop()
    with closing(sqlite3.connect(tmp_path / "streams.sqlite")) as database, database:
        database.execute("update versions set role = 'live'")
    assert "versions" in str(check(tmp_path).pages)
    with pytest.raises(JournalError, match="damaged"):
        engine(source_file, tmp_path, shadow=new_file, **CHEAP)


def test_the_shadow_waits_for_all_batches_that_are_to_be_answered(source_file, new_file, tmp_path, monkeypatch):
    batches, order, begin = pictures(4, 2), [], threading.Event()
    with engine_of(source_file, tmp_path, "a", shadow=new_file, **CHEAP) as made:
        for who, lender in (("live", made.live), ("shadow", made.shadow.lender)):
            monkeypatch.setattr(lender, "answer", noting(lender.answer, who, order))
        blocked = made.submit("local/a", begin.wait)
        waiting = [made.batch("local/a", images, None, str(number)) for number, images in enumerate(batches)]
        begin.set()
        assert blocked.result()
        assert [future.result()[0]["number"] for future in waiting] == [1, 2, 3, 4]
        settled(made, 4)
    assert order == ["live"] * 4 + ["shadow"] * 4


def noting(work, who, order):
    return lambda *given: order.append(who) or work(*given)


def test_alarms_that_differ_after_a_switch_are_told(source_file, new_file, tmp_path):
    def alarm(kind):
        return {"kind": kind, "since": 1.0, "batch": 1, "words": f"it is {kind}"}

    told = []
    with engine_of(source_file, tmp_path, **CHEAP) as made:
        made.alarms._sender = SimpleNamespace(send=told.append)
        made.alarms.take_over({"local/a": [alarm("attack"), alarm("abstentions")], "local/b": [alarm("attack")]})
        assert [(one["event"], one["stream"]) for one in told] == [("raised", "a")] * 2 + [("raised", "b")]
        told.clear()
        made.alarms.take_over({"local/a": [alarm("attack")]})
        assert [(one["event"], one["stream"], one["alarm"]["kind"]) for one in told] == [
            ("cleared", "a", "abstentions"), ("cleared", "b", "attack"),
        ]  # fmt: skip
        assert [one["stream"] for one in made.alarms.of("local")] == ["a"]
        assert made.metrics.alarms_active.labels("attack")._value.get() == 1
        made.alarms._sender = None
