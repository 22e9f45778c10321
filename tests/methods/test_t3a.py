"""Test what T3A keeps of a batch."""

from __future__ import annotations

import torch

import safer_tta
from tests.conftest import small_net


def test_one_image_without_an_answer_does_not_spoil_the_others(images):
    adapted = safer_tta.adapt(small_net(), "t3a", "plain", seed=0, validate=False)
    spoilt = images.clone()
    spoilt[0] = torch.nan
    answer = adapted(spoilt).probs
    assert torch.isnan(answer[0]).all()
    assert torch.isfinite(answer[1:]).all()
