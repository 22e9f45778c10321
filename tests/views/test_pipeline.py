"""Test how views are made from a draw, and which pipelines are refused."""

import pytest
import torch

from safer_tta.errors import InvalidValueError, UnknownNameError
from safer_tta.views import Pipeline


def test_views_written_in_place_are_those_with_a_graph(images):
    draw = Pipeline().draw(4, len(images), torch.Generator().manual_seed(0))
    tracked = images.clone().requires_grad_(True)
    assert torch.equal(draw.views(images), draw.views(tracked).detach())


@pytest.mark.parametrize("inference", [False, True])
def test_views_made_in_parallel_are_the_same_views(inference):
    """Threads make the same views as one loop does, and leave the caller's number of threads as it is."""
    before = torch.get_num_threads()
    images = torch.rand(12, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    draw = Pipeline().draw(4, 12, torch.Generator().manual_seed(1))
    try:
        with torch.inference_mode(inference):
            torch.set_num_threads(2)
            together = draw.views(images)
            assert torch.get_num_threads() == 2
            torch.set_num_threads(1)
            alone = draw.views(images)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"preset": "mine"}, UnknownNameError, "released"),
        ({"max_operators": 0}, InvalidValueError, "max_operators is 0; expected .* 1 to 16"),
        ({"max_operators": 2.5}, InvalidValueError, "max_operators is 2.5; expected .* 1 to 16"),
    ],
)
def test_mistakes_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        Pipeline(**options)
