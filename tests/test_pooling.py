"""Test pooling rules at their edges; tests/parity compares them with the paper's formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta import AdaptiveMixing, pooling
from safer_tta.errors import InvalidValueError, UnknownNameError
from tests.contract.parts import generator as seeded


def test_views_share_equally_if_all_reliabilities_are_negative():
    z = torch.randn(1, 8, 5, generator=seeded(0))
    features = torch.cat([z, -z])  # two views that contradict each other
    assert (pooling.reliability(features) < 0).all()
    pooled = pooling.pool("cc_drop", torch.full((2, 8, 3), 1 / 3), features)
    assert torch.allclose(pooled.weights, torch.full((2, 8), 0.5))
    assert pooled.dropped == -1


@pytest.mark.parametrize("seed", range(20))
def test_of_two_views_the_original_is_dropped(seed):
    """Both reliabilities are equal to the last bit, whatever the features."""
    generator = seeded(seed)
    z = torch.randn(7, 33, generator=generator)
    features = torch.stack([z, z + torch.randn(7, 33, generator=generator)])
    assert pooling.reliability(features)[0] == pooling.reliability(features)[1] > 0
    pooled = pooling.pool("cc_drop", torch.full((2, 7, 3), 1 / 3), features)
    assert pooled.dropped == 0
    assert torch.equal(pooled.weights[:, 0], torch.tensor([0.0, 1.0]))


def test_a_view_counts_as_dropped_only_if_the_whole_batch_goes_without_it():
    probs = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.9, 0.1], [0.5, 0.5]]])
    assert pooling.pool("entropy", probs, torch.rand(2, 2, 3)).dropped == -1


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (6, 9, 6, 12))),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    rule=st.sampled_from(sorted(pooling.RULES)),
)
def test_weights_sum_to_one_with_and_without_mixing(sizes, seed, scale, rule):
    views, batch, classes, width = sizes
    generator = seeded(seed)
    probs = (scale * torch.randn(views, batch, classes, generator=generator)).softmax(-1)
    features = scale * torch.randn(views, batch, width, generator=generator)
    weights = pooling.weights(rule, probs, features)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(0), torch.ones(batch), atol=1e-5)
    mixed = AdaptiveMixing().weigh(weights, probs, features, torch.zeros(0)).answer
    assert torch.allclose(mixed.sum(0), torch.ones(batch), atol=1e-5)


def test_mistakes_are_refused():
    with pytest.raises(UnknownNameError, match="cc_drop"):
        pooling.weights("best", torch.rand(2, 3, 4), torch.rand(2, 3, 4))
    with pytest.raises(InvalidValueError, match="V,B,d"):
        pooling.reliability(torch.rand(3, 4))
