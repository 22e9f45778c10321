"""Test which batches are accepted as images, and what the refusal of others advises."""

import pytest
import torch

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.predictors import check_images


@pytest.mark.parametrize("size", [(17, 17), (33, 33), (50, 50), (20, 31)])
def test_any_height_and_width_is_accepted(model, size):
    images = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(0))
    probs = safer_tta.adapt(model, seed=0)(images).probs
    assert probs.shape == (4, 5)
    assert torch.isfinite(probs).all()


def test_bytes_are_the_floats_that_they_stand_for(model, images):
    eight = (images * 255).round().byte()
    a, b = (safer_tta.adapt(model, seed=0)(x).probs for x in (eight, eight.float() / 255))
    assert torch.equal(a, b)


def test_numpy_arrays_are_refused(model, images):
    with pytest.raises(InvalidTypeError, match=r"images are ndarray; expected a torch\.Tensor"):
        safer_tta.adapt(model)(images.numpy())


def test_validate_false_does_not_look_at_values(model, images):
    trusted = safer_tta.adapt(model, seed=0, validate=False)
    trusted(images + 0.5)
    with pytest.raises(InvalidValueError, match="shape"):
        trusted(images[:, :1])  # shapes are still checked, which costs nothing


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((2, 8, 8, 3), r"images.permute\(0, 3, 1, 2\)"),
        ((3, 8, 8), r"images.unsqueeze\(0\)"),
        ((2, 1, 8, 8), "images.expand"),
        ((2, 4, 8, 8), r"images\[:, :3\]"),
    ],
)
def test_the_refusal_of_a_shape_names_what_mends_it(shape, advice):
    with pytest.raises(InvalidValueError, match=advice):
        check_images(torch.zeros(shape))


def test_the_refusal_of_a_rounding_error_advises_to_clamp(images):
    images[0, 0, 0, 0] = 1 + 2e-7
    with pytest.raises(InvalidValueError, match=r"1\.0000002\].*images\.clamp\(0, 1\)"):
        check_images(images)
