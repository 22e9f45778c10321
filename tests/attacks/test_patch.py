"""The patch: nothing outside its square moves, and it does harm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta.attacks import ATTACKS, full_threat, patch
from safer_tta.attacks.patch import random_squares
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import eight_bit, generator, labels
from tests.conftest import batches, small_net


@settings(max_examples=25, deadline=None)
@given(area=st.floats(0.01, 1), height=st.integers(10, 20), width=st.integers(10, 20), seed=st.integers(0, 1000))
def test_nothing_outside_a_square_of_the_area_moves(area, height, width, seed):
    images = torch.rand(5, 3, height, width, generator=generator(seed))  # between the levels
    found = patch(small_net().eval(), images, labels(5), area=area, steps=2, generator=generator(seed))
    moved = found.ne(images).any(dim=1)
    side = int((area * height * width) ** 0.5)
    for one in moved:
        rows, columns = one.any(dim=1).nonzero(), one.any(dim=0).nonzero()
        assert 1 <= int(rows[-1] - rows[0]) + 1 <= side
        assert 1 <= int(columns[-1] - columns[0]) + 1 <= side
    levels = (found * 255)[moved[:, None].expand_as(found)]
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert 0 <= found.min() <= found.max() <= 1
    assert ATTACKS["patch"].exceeds(found - images, {"area": area}) is None


def test_squares_have_their_size_and_lie_anywhere():
    squares = random_squares(torch.zeros(400, 3, 6, 9), 4, generator())
    assert squares.sum(dim=(1, 2, 3)).tolist() == [16] * 400
    corners = {tuple(square[0].nonzero()[0].tolist()) for square in squares}
    assert corners == {(row, column) for row in range(3) for column in range(6)}


def test_the_surrogate_is_asked_about_images_with_their_squares():
    model, images, asked = small_net().eval(), eight_bit() / 255, []
    patch(lambda x: asked.append(x.detach()) or model(x), images, labels(), area=0.2, steps=3)
    assert len(asked) == 3
    assert all(bool(shown.ne(images).any()) for shown in asked)
    assert all(ATTACKS["patch"].exceeds(shown - images, {"area": 0.2}) is None for shown in asked)


def test_it_harms_more_than_its_start():
    model = small_net().eval()
    images = (torch.cat(batches(6)) * 255).round() / 255
    own = model(images).argmax(dim=1)
    right = []
    for steps in (1, 100):
        found = patch(model, images, own, area=0.3, steps=steps, generator=generator())
        right.append(int((model(found).argmax(dim=1) == own).sum()))
    assert right[1] < right[0]


def test_what_reaches_beyond_the_square_is_refused():
    """A changed pixel in the wrong place or a square too large; the budget is in words of its own."""
    known, images = ATTACKS["patch"], torch.zeros(2, 3, 10, 10)
    threat = {"area": 0.09}
    images[1, 0, 2:5, 4:7] = 1
    assert known.exceeds(images, threat) is None
    images[1, 2, 5, 4] = 0.5
    assert known.exceeds(images, threat) == "changed a square of 4 pixels a side; allowed are 3"
    assert known.exceeds(torch.zeros(2, 3, 10, 10), threat) is None


def test_its_budget_is_an_area_and_no_ball():
    assert full_threat("patch") == {"step": 2 / 255, "steps": 100, "area": 0.05}
    for name, value in (("eps", 8 / 255), ("norm", "linf")):
        with pytest.raises(InvalidTypeError, match=f"attack 'patch' has no option {name}"):
            full_threat("patch", **{name: value})
    with pytest.raises(InvalidValueError, match="area is 2; expected a number from 0 to 1"):
        patch(small_net(), eight_bit(), labels(), area=2)
    with pytest.raises(InvalidValueError, match=r"area is 0.001, less than a pixel of 16x16; expected a larger share"):
        patch(small_net(), eight_bit(), labels(), area=0.001)
