"""Test what the anchor keeps of a stream's first images."""

import pytest
import torch

from safer_tta.guards import Anchor
from tests.conftest import adapt_small, batches, identical, same
from tests.guards.parts import EVERY, guarded, states_after


def test_images_outlive_the_buffer_that_they_arrived_in():
    anchor, buffer = Anchor(8), torch.randint(0, 256, (8, 3, 24, 24), dtype=torch.uint8)
    first = buffer.clone()
    anchor.offer(buffer)
    buffer.zero_()
    assert torch.equal(anchor.images, first)


def test_a_failed_look_at_the_first_images_loses_nothing(monkeypatch):
    guard = guarded(least_agreement=0.5)
    *_, learnt = states_after(guard, batches(3))

    def exhausted(method, images):
        raise torch.OutOfMemoryError("no memory for so many images at once")

    monkeypatch.setattr(type(guard.method), "predict", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        guard.memory.anchor.agreement(guard.method)
    assert same(guard.state_dict(), learnt)


def test_a_rollback_skips_states_that_have_forgotten_the_first_images():
    guard = guarded(**EVERY)
    first, *_ = states_after(guard, batches(4))
    for _, snapshot in guard.memory.healthy[1:]:
        snapshot["model.norm1.weight"].neg_()  # as if learnt: finite, and worthless
        snapshot["model.norm2.weight"].neg_()
    guard.rollback()
    assert guard.counters["drifted_snapshots"] == 2
    assert same(guard.state_dict(), first)


def test_looking_at_the_first_images_changes_nothing():
    """Not the weights, not the generator: SAFER's views are the same with a rollback's look or without."""
    guard = guarded(predictor="safer")
    *_, before = states_after(guard, batches(2))
    assert guard.memory.anchor.agreement(guard.method) == 1.0
    assert identical(guard.state_dict(), before)


def test_the_first_images_are_compared_under_one_draw_of_views():
    """A method that never learns answers them as at its start, whenever somebody asks."""
    guard = guarded("none", predictor="safer", window=1, least_images=1000)
    for images in batches(4, size=60):
        guard(images)
        assert len(guard.memory.anchor.images) == 60
        assert guard.memory.anchor.agreement(guard.method) == 1.0


def test_agreement_is_the_share_of_the_first_images_answered_as_at_the_start():
    start, method = adapt_small(), adapt_small(lr=0.3)
    anchor, shares = Anchor(), []
    for images in batches(3, size=60):
        anchor.offer(images)
        method(images)
        same_answer = method.predict(anchor.images).labels == start.predict(anchor.images).labels
        shares.append(float(same_answer.float().mean()))
        assert anchor.agreement(method) == shares[-1]
    assert min(shares) < 1


def test_the_anchor_holds_the_first_128_images():
    anchor, stream = Anchor(), batches(3, size=60)
    for images in stream:
        anchor.offer(images)
    assert torch.equal(anchor.images, (torch.cat(stream)[:128] * 255).round().to(torch.uint8))
