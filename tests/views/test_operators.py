"""Test operators on any shape; tests/contract has what each must keep, tests/parity what each computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta.errors import InvalidValueError
from safer_tta.views import OPERATORS


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(OPERATORS)),
    size=st.integers(1, 4),
    height=st.integers(5, 20),
    width=st.integers(5, 20),
    seed=st.integers(0, 2**31),
    fill=st.sampled_from(["random", "black", "white"]),
)
def test_results_stay_in_range_on_any_shape(name, size, height, width, seed, fill):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 3, height, width, generator=generator)
    if fill != "random":
        images = torch.full_like(images, float(fill == "white"))
    out = OPERATORS[name](images, OPERATORS[name].sample(size, generator), generator=generator)
    assert out.shape == images.shape
    assert 0 <= out.min() <= out.max() <= 1


def test_equalize_keeps_the_dtype_under_another_default(images):
    torch.set_default_dtype(torch.float64)
    try:
        assert OPERATORS["equalize"](images).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_value_for_all_images_is_refused():
    with pytest.raises(InvalidValueError, match="one value per image"):
        OPERATORS["rotate"](torch.rand(2, 3, 8, 8), 10.0)
