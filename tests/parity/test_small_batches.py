"""The gate on batches below its window of 64 images, which the images before complete."""

import numpy as np
import pytest
import torch

from safer_tta.gate.straying import SIZE, Recent, evidence
from tests.parity.test_gate import FRESH_32, V, attacked_views, decide, expected_logs, random_views

WINDOW = 64


@pytest.mark.parametrize("size", [1, 4, 16, 48])
def test_batches_of_any_size_are_judged_by_sums_over_the_last_images(size):
    """Sums fade by the share of the window that a batch takes; here all images are kept, with their weights."""
    _, features = random_views(3, batch=192)
    features = features.double()
    recent = Recent.of(torch.zeros(SIZE, dtype=torch.float64))
    for first in range(0, 192, size):
        _, recent = evidence(features[:, first : first + size], recent)
    fading = [(1 - size / WINDOW) ** age for age in range(192 // size - 1, -1, -1)]
    weights = np.repeat(fading, size)
    logs = np.array([row[2:] for row in expected_logs(features.numpy())]).reshape(192, V - 1, 2)
    augmented, others = logs[..., 0], logs[..., 1]
    sums = [others, augmented, others**2, others * augmented]
    assert recent.images.item() == pytest.approx(weights.sum())
    assert recent.line.numpy() == pytest.approx([(weights[:, None] * column).sum() for column in sums])
    assert recent.squares[0].item() == pytest.approx((weights[:, None] * (augmented - others) ** 2).sum())


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
