"""Test the memory of images that NOTE, SoTTA and RoTTA learn from."""

from __future__ import annotations

import pytest
import torch

import safer_tta
from safer_tta.errors import InvalidValueError
from tests.conftest import batches, small_net


@pytest.fixture(params=["note", "rotta", "sotta"])
def remembering(request) -> safer_tta.Method:
    unsure = {"threshold": 0.0} if request.param == "sotta" else {}  # it remembers only what it is sure of
    return safer_tta.adapt(small_net(), request.param, "plain", seed=0, **unsure)


def test_images_outlive_the_buffer_that_they_arrived_in(remembering):
    """A camera's loop sends one image at a time, always in the same buffer."""
    stream = batches(4, size=1)
    buffer = stream[0].clone()
    for following in stream[1:]:
        remembering(buffer)
        held = remembering.state.memory["memory_image"]
        if len(held):
            assert torch.equal(held[0], stream[0][0].to(held.dtype)), "the first image is still the first image"
        buffer.copy_(following)
    assert len(remembering.state.memory["memory_image"]) > 1


def test_images_of_another_size_are_refused_and_change_nothing(remembering):
    remembering(batches(1)[0])
    before = remembering.state_dict()
    with pytest.raises(InvalidValueError, match=r"images are \(3, 32, 32\) and the memory holds \(3, 24, 24\)"):
        remembering(batches(1, side=32)[0])
    assert all(torch.equal(t, before[n]) for n, t in remembering.state_dict().items())
