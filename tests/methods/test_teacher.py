"""Test what follows a teacher to another device."""

from __future__ import annotations

import pytest
import torch

import safer_tta
from safer_tta import Classifier
from tests.conftest import small_net


@pytest.mark.parametrize("method", ["tesla", "cotta", "rotta"])
def test_a_teachers_normalisation_follows_to_another_device(method):
    adapted = safer_tta.adapt(Classifier(small_net(), mean=0.5, std=0.5), method, "plain", seed=0)
    adapted.state.to(torch.device("meta"))
    assert adapted.teacher.classifier.mean.device.type == "meta"
