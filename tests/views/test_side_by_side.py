"""Views of several batches at once are those that each batch gets alone."""

import pytest
import torch

from safer_tta.views import PRESETS, Pipeline, side_by_side
from tests.conftest import batches


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_views_of_several_batches_are_those_of_each(preset, dtype):
    pipeline, generator = Pipeline(preset), torch.Generator().manual_seed(0)
    images = torch.stack(batches(5, size=3)).to(dtype)
    draws = [pipeline.draw(4, 3, generator) for _ in images]
    together = side_by_side(images, draws)
    assert together.shape == (5, 3, 5, *images.shape[2:])
    for number, (batch, draw) in enumerate(zip(images, draws, strict=True)):
        torch.testing.assert_close(together[:, :, number], draw.views(batch), rtol=0, atol=1e-6)


def test_without_views_there_are_the_images():
    images = torch.stack(batches(2, size=3))
    draws = [Pipeline().draw(0, 3, torch.Generator()) for _ in images]
    assert torch.equal(side_by_side(images, draws), images.transpose(0, 1)[None])
