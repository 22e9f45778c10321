"""Test what every predictor inherits."""

from __future__ import annotations

import concurrent.futures

import torch

from safer_tta import Plain
from tests.conftest import batches


def test_threads_may_share_a_predictor(model):
    predictor = Plain(model.eval())
    sizes = [batches(1, size=n)[0] for n in (3, 4, 5, 6)]
    expected = [predictor(x).probs for x in sizes]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(predictor, sizes * 25))
    assert all(torch.equal(a.probs, expected[i % 4]) for i, a in enumerate(answers))
