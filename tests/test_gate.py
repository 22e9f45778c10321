"""Test what the gate refuses; tests/parity has its formulas."""

import pytest
import torch

from safer_tta import Gate
from safer_tta.errors import InvalidTypeError, InvalidValueError


def test_two_augmented_views_are_too_few():
    views = torch.rand(3, 4, 5)
    with pytest.raises(InvalidValueError, match=r"2 augmented views are too few .*expected at least 3"):
        Gate().weigh(torch.full((3, 4), 1 / 3), views.softmax(-1), views, torch.zeros(Gate().memory_size(5)))


@pytest.mark.parametrize("cost", [0, -1, float("nan"), "high"])
def test_a_cost_that_is_not_a_positive_number_is_refused(cost):
    error = InvalidTypeError if cost == "high" else InvalidValueError
    with pytest.raises(error, match=r"cost is .*; expected a positive number"):
        Gate(cost=cost)


def test_a_share_of_the_clean_original_above_one_is_refused():
    with pytest.raises(InvalidValueError, match="from 0 to 1"):
        Gate(alpha_clean=1.5)
