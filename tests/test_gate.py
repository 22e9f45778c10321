"""Test what the gate refuses; tests/parity has its formulas and other refusals."""

from __future__ import annotations

import pytest
import torch

from safer_tta import Gate
from safer_tta.errors import InvalidTypeError, InvalidValueError


def test_two_augmented_views_are_too_few():
    views = torch.rand(3, 4, 5)
    with pytest.raises(InvalidValueError, match=r"2 augmented views are too few .*expected at least 3"):
        Gate().weigh(torch.full((3, 4), 1 / 3), views.softmax(-1), views, torch.zeros(3))


@pytest.mark.parametrize(("cost", "error"), [(float("nan"), InvalidValueError), ("high", InvalidTypeError)])
def test_a_cost_that_is_not_a_number_is_refused(cost, error):
    with pytest.raises(error, match=r"cost is .*; expected a positive number"):
        Gate(cost=cost)
