"""The gate on batches below its window of 64 images, which the images before complete."""

import pytest
import torch

from safer_tta.gate.straying import Recent, evidence
from tests.parity.test_gate import FRESH_32, D, V, attacked_views, decide, random_views

WINDOW = 64


@pytest.mark.parametrize("size", [1, 4, 16, 48])
def test_batches_of_any_size_have_the_scales_of_the_last_images(size):
    """Sums fade by the share of the window that a batch takes; here all images are kept, with their weights."""
    _, features = random_views(3, batch=192)
    features = features.double()
    recent = Recent.of(torch.zeros(Recent.size(D), dtype=torch.float64))
    for first in range(0, 192, size):
        _, recent = evidence(features[:, first : first + size], recent)
    batches = [features[1:, first : first + size].numpy() for first in range(0, 192, size)]
    fading = [(1 - size / WINDOW) ** age for age in range(len(batches) - 1, -1, -1)]
    weight = sum(f * b.shape[1] for f, b in zip(fading, batches, strict=True))
    mean = sum(f * b.sum(axis=(0, 1)) for f, b in zip(fading, batches, strict=True)) / (weight * (V - 1))
    square = sum(f * ((b - mean) ** 2).sum(axis=(0, 1)) for f, b in zip(fading, batches, strict=True))
    assert recent.images.item() == pytest.approx(weight)
    assert recent.mean.numpy() == pytest.approx(mean)
    assert recent.variance.numpy() == pytest.approx(square / (weight * (V - 1)))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_small_clean_batches_are_seldom_called_attacked_and_attacked_ones_are(size):
    clean, attacked = attacked_views(0, batch=256), attacked_views(256, batch=256)
    called = {}
    for name, features in (("clean", clean), ("attacked", attacked)):
        memory, suspicions = FRESH_32, []
        for first in range(0, 256, size):
            verdict = decide(features[:, first : first + size], memory)
            memory = verdict.memory
            suspicions.append(verdict.suspicion)
        called[name] = (torch.cat(suspicions)[64:] > 0.5).float().mean()
    assert called["clean"] <= 0.05
    assert called["attacked"] >= 0.95
