"""Alarms over the last images of a stream: raised once, cleared once, whatever the batches."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safer_tta.errors import InvalidValueError
from safer_tta.guards import KINDS, Watch, flags
from safer_tta.guards.watch import CLEARED, JUDGED, RAISED, chance
from safer_tta.predictors import Prediction, Report
from tests.conftest import batches
from tests.guards.parts import guarded


def answers(suspicion, broken=()) -> Prediction:
    """Answers to images of this suspicion; those of the images named are not finite."""
    probs = torch.full((len(suspicion), 3), 1 / 3)
    probs[list(broken)] = torch.nan
    return Prediction(probs, probs, probs, Report(weights=probs.T, suspicion=torch.tensor(suspicion).float()))


def watched(images: list[bool], size: int, watch: Watch | None = None) -> tuple[Watch, list[str]]:
    """Show a watch these images in batches of a size; return everything that it raised or cleared."""
    watch, told = watch or Watch(), []
    for batch, first in enumerate(range(0, len(images), size), start=1):
        told += watch.see(answers(images[first : first + size]), 0.5, now=float(batch), batch=batch)
    return watch, told


def mixed(count: int, share: float, seed: int = 0) -> list[bool]:
    return (np.random.default_rng(seed).random(count) < share).tolist()


@pytest.mark.parametrize("size", [1, 3, 16, 64, 200])
def test_an_alarm_is_raised_once_and_cleared_once(size):
    watch, told = watched([*mixed(400, 0.01), *mixed(400, 0.4), *mixed(600, 0.01)], size)
    assert told == [KINDS["attack"].raised, KINDS["attack"].cleared]
    assert watch.active == ()


def test_a_clean_stream_raises_none():
    watch, told = watched(mixed(20_000, KINDS["attack"].in_order), 16)
    assert told == []
    assert watch.suspicious == pytest.approx(KINDS["attack"].in_order, abs=0.05)


def test_a_share_between_the_two_probabilities_changes_nothing():
    between = next(n for n in range(JUDGED) if RAISED < chance(n, JUDGED, 0.05) < CLEARED)
    images = [True] * between + [False] * (JUDGED - between)
    assert watched(images * 3, JUDGED)[1] == []
    watch, told = watched([True] * JUDGED, 64)
    assert len(told) == len(watch.active) == 2  # most answers are flagged too
    watched(images * 3, JUDGED, watch)
    assert [alarm.kind for alarm in watch.active] == ["attack"]


def test_the_limits_are_those_that_the_pages_name():
    in_order = KINDS["attack"].in_order
    assert next(n for n in range(JUDGED) if chance(n, JUDGED, in_order) < RAISED) == 33
    assert max(n for n in range(JUDGED) if chance(n, JUDGED, in_order) > CLEARED) == 19


def test_few_images_are_judged_with_care():
    assert watched([True] * 4, 1)[1] == []
    assert watched([True] * 8, 1)[1] == [KINDS["attack"].raised]


def test_answers_that_are_not_finite_are_flagged_and_no_sign_of_an_attack():
    watch, told = Watch(), []
    for batch in range(8):
        told += watch.see(answers([0.0] * 8, broken=range(8)), 0.5, now=0.0, batch=batch)
    assert told == [KINDS["abstentions"].raised]
    assert (watch.suspicious, watch.abstained) == (0.0, 64)


def test_a_suspicion_that_is_not_a_number_is_suspicious():
    suspicious, flagged = flags(answers([0.2, torch.nan, 0.9], broken=[0]), 0.5)
    assert suspicious.tolist() == [False, True, True]
    assert flagged.tolist() == [True, True, True]


def test_without_suspicion_nothing_is_said_of_attacks():
    guard = guarded()
    list(guard.stream(batches(4)))
    assert guard.memory.watch.suspicious is None
    assert guard.alarms == ()


@given(st.lists(st.booleans(), max_size=600), st.integers(1, 64), st.lists(st.booleans(), max_size=64))
def test_a_watch_goes_on_from_json_as_if_it_had_never_stopped(images, size, more):
    watch, _ = watched(images, size)
    again = Watch.unpack(json.loads(json.dumps(watch.pack())))
    assert again == watch
    assert watched(more, size, again) == watched(more, size, watch)
    assert Watch.unpack(None) == Watch()


@given(st.integers(1, JUDGED), st.floats(0.01, 0.99))
def test_the_chance_is_a_probability_that_falls(images, share):
    found = [chance(flagged, images, share) for flagged in range(images + 1)]
    assert found[0] == pytest.approx(1)
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(share**images)


def test_a_guard_tells_when_an_alarm_is_raised_and_keeps_it_over_a_reset():
    alarms = []
    guard = guarded(predictor="safer-g", abstain=0.0, on_alarm=alarms.append)  # every image is flagged
    list(guard.stream(batches(8)))
    assert [alarm.what for alarm in alarms] == [(KINDS["attack"].raised,), (KINDS["abstentions"].raised,)]
    assert [alarm.kind for alarm in alarms[1].active] == ["attack", "abstentions"]
    guard.reset()
    assert [alarm.kind for alarm in guard.alarms] == ["attack", "abstentions"]
    assert guard.alarms[0].batch == alarms[0].batch
    with pytest.raises(InvalidValueError, match="abstain is 2"):
        guarded(abstain=2)
