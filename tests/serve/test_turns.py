import queue
import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safer_tta.serve.turns import Turns, owner_of

STREAMS = st.sampled_from([f"{owner}/{name}" for owner in ("anna", "bert", "carl") for name in ("x", "y", "z")])
WORK = st.lists(STREAMS, max_size=30)


class Job(NamedTuple):
    stream: str
    number: int


def filled(streams) -> Turns[Job]:
    turns: Turns[Job] = Turns()
    for number, stream in enumerate(streams):
        turns.put(Job(stream, number))
    return turns


def served(turns) -> list[Job]:
    turns.close()
    return list(iter(turns.get, None))


def test_an_owner_with_one_job_waits_for_one_job_of_each_other_owner():
    turns = filled(["anna/x"] * 100 + ["bert/x"] * 100 + ["carl/x"])
    assert [job.stream for job in served(turns)[:4]] == ["anna/x", "bert/x", "carl/x", "anna/x"]


def test_an_owner_who_comes_back_is_served_after_those_who_wait_for_longer():
    """Two owners who always send one job keep neither each other nor the one with many from being served."""
    turns, order = filled(["anna/x"] * 20), []
    for number in range(12):
        if number % 2:
            turns.put(Job("bert/x", number))
            turns.put(Job("carl/x", number))
        job = turns.get()
        assert job is not None
        order.append(job.stream[0])
    assert order[:2] == ["a", "b"]
    assert sorted(order[1:10]) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_the_streams_of_an_owner_take_turns():
    turns = filled(["anna/x"] * 3 + ["anna/y"] * 2 + ["bert/x"])
    names = [job.stream for job in served(turns)]
    assert names == ["anna/x", "bert/x", "anna/y", "anna/x", "anna/y", "anna/x"]


@given(WORK)
def test_every_job_is_served_once_and_the_jobs_of_a_stream_in_order(streams):
    turns = filled(streams)
    assert turns.qsize() == len(streams)
    jobs = served(turns)
    assert sorted(jobs, key=lambda job: job.number) == [Job(s, n) for n, s in enumerate(streams)]
    for stream in set(streams):
        numbers = [job.number for job in jobs if job.stream == stream]
        assert numbers == sorted(numbers)
    assert turns.qsize() == 0


@given(WORK)
def test_nobody_is_served_twice_while_another_owner_waits(streams):
    jobs = served(filled(streams))
    for place, job in enumerate(jobs[1:], start=1):
        if owner_of(job.stream) == owner_of(jobs[place - 1].stream):
            assert {owner_of(later.stream) for later in jobs[place:]} == {owner_of(job.stream)}


@given(WORK, st.sets(st.integers(0, 30)), st.integers(0, 5))
def test_more_jobs_come_from_other_streams_and_are_the_first_of_each(streams, accepted, most):
    turns = filled(streams)
    expected: dict[str, list[int]] = {}
    for number, stream in enumerate(streams):
        expected.setdefault(stream, []).append(number)
    while turns.qsize():
        first = turns.get()
        assert first is not None
        assert expected[first.stream].pop(0) == first.number
        firsts = {stream: numbers[0] for stream, numbers in expected.items() if numbers}
        more = turns.take_more(lambda job: job.number in accepted, most)
        more += turns.take_more(lambda job: job.number in accepted, most - len(more))  # asked again, the same holds
        group = [first.stream, *(job.stream for job in more)]
        assert len(set(group)) == len(group)
        assert len(more) <= most
        may = [n for stream, n in firsts.items() if stream != first.stream and n in accepted]
        assert len(more) == min(most, len(may))
        for job in more:
            assert firsts[job.stream] == job.number
            assert job.number in accepted
            expected[job.stream].pop(0)
    assert not any(expected.values())


def test_more_jobs_are_taken_in_turns_over_owners():
    turns = filled(["anna/a", "anna/b", "anna/c", "bert/a", "carl/a"])
    assert turns.get() == Job("anna/a", 0)
    assert [job.stream for job in turns.take_more(lambda _: True, 3)] == ["bert/a", "carl/a", "anna/b"]
    assert turns.get() == Job("anna/c", 2)


@given(WORK, st.lists(st.integers(0, 30)))
def test_discarded_jobs_are_not_served(streams, unwanted):
    turns = filled(streams)
    jobs = turns.drain()
    for job in sorted(jobs, key=lambda job: job.number):
        turns.put(job)
    gone = set()
    for job in jobs:
        if job.number in unwanted:
            assert turns.discard(job)
            assert not turns.discard(job)
            gone.add(job)
    assert set(served(turns)) == set(jobs) - gone


def test_a_full_queue_takes_no_more():
    turns: Turns[Job] = Turns(1)
    turns.put(Job("anna/x", 0))
    assert turns.full()
    with pytest.raises(queue.Full):
        turns.put(Job("bert/x", 1))
    assert turns.drain() == [Job("anna/x", 0)]
    assert not turns.full()


def test_a_reader_waits_for_work_and_for_the_end():
    turns: Turns[Job] = Turns()
    got: list[Job | None] = []
    reader = threading.Thread(target=lambda: got.extend([turns.get(), turns.get()]))
    reader.start()
    turns.put(Job("anna/x", 0))
    turns.close()
    reader.join(30)
    assert got == [Job("anna/x", 0), None]
