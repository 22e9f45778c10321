"""The engine's queue, over owners."""

import contextlib

import numpy as np
import pytest

from safer_tta.serve.limits import Limits, Refused
from tests.serve.helpers import CHEAP, engine_of
from tests.serve.test_limits import held


def test_a_light_owner_is_the_next_one_after_a_flooding_one(source_file, tmp_path):
    order: list[str] = []
    with engine_of(source_file, tmp_path, **CHEAP) as made:
        with held(made, "anna/held"):
            waiting = [made.submit(f"anna/{n % 8}", lambda: order.append("anna")) for n in range(100)]
            waiting += [made.submit("bert/a", lambda: order.append("bert")) for _ in range(2)]
        for future in waiting:
            future.result(60)
    assert order[:4] == ["bert", "anna", "bert", "anna"]


def test_flooding_owners_leave_places_in_the_queue(source_file, tmp_path):
    """However many they are, the next one finds a place; nothing is set aside for owners who do not come."""
    limits = Limits(queue=64, owner_queue=60)
    with engine_of(source_file, tmp_path, limits=limits, **CHEAP) as made, held(made, "held/held"):
        for owner in ("anna", "bert", "carl"):
            placed = 0
            with contextlib.suppress(Refused):
                for number in range(64):
                    made.submit(f"{owner}/{number % 32}", int)
                    placed += 1
            assert 3 <= placed < 60
            with pytest.raises(Refused, match="of this owner"):
                made.room.check(f"{owner}/new")
        made.submit("dora/a", int)


def test_what_is_being_decoded_counts_as_waiting(source_file, tmp_path):
    limits = Limits(stream_queue=2, owner_queue=3)
    with engine_of(source_file, tmp_path, limits=limits, **CHEAP) as made:
        with made.room.coming("anna/a"), made.room.coming("anna/a"):
            with pytest.raises(Refused, match="of this stream"):
                made.room.check("anna/a")
            with made.room.coming("anna/b"), pytest.raises(Refused, match="of this owner"):
                made.submit("anna/b", int)
            made.submit("bert/a", int).result(60)
        made.submit("anna/a", int).result(60)
        assert not made.room._coming


def test_a_job_that_is_taken_back_gives_its_place_up_at_once(source_file, tmp_path):
    applied: list[int] = []
    with engine_of(source_file, tmp_path, limits=Limits(stream_queue=4), **CHEAP) as made:
        with held(made, "anna/a"):
            waiting = [made.submit("anna/a", lambda number=number: applied.append(number)) for number in range(3)]
            with pytest.raises(Refused):
                made.room.check("anna/a")
            assert waiting[1].cancel()
            made.room.check("anna/a")
            image = np.zeros((1, 3, 8, 8), np.uint8)
            last = made.batch("anna/a", image, None, "x")
        with pytest.raises(Refused, match="was deleted"):
            last.result(60)
        assert not waiting[0].cancel()
    assert applied == [0, 2]
