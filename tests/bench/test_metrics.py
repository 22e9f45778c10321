"""Figures of a stream of answers, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from safer_tta.bench.metrics import calibration_error, rolling


def test_rolling_means():
    assert rolling([0, 100, 50], 2) == [0, 50, 75]


def test_calibration_error():
    """Two answers have a confidence of 0.9, of which one is right; one has 0.6 and is right."""
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    assert calibration_error(probs, torch.tensor([1.0, 0.0, 1.0])) == pytest.approx((0.8 + 0.4) / 3)
