"""Test which batches are accepted as images, and what the refusal of others advises."""

import pytest
import torch

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.predictors import check_images
from tests.conftest import adapt_small, batches
from tests.models.families.build import with_channels


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


@pytest.mark.parametrize("predictor", ["plain", "jpeg", "fft", "blur", "safer", "safer-a", "safer-g"])
@pytest.mark.parametrize("method", ["tent", "memo", "cotta", "tesla"])
def test_grey_images_are_taken_by_a_grey_model(method, predictor):
    adapted = safer_tta.adapt(with_channels(1), method, predictor, seed=0)
    assert adapted(batches(1)[0][:, :1]).probs.shape == (6, 10)


def test_any_number_of_channels_is_taken_without_views():
    images = torch.rand(3, 12, 24, 24)
    assert safer_tta.adapt(with_channels(12), predictor="plain", seed=0)(images).probs.shape == (3, 10)
    with pytest.raises(InvalidValueError, match=r"12 channels; expected 1 or 3 .*adapt\(model, predictor='plain'\)"):
        safer_tta.adapt(with_channels(12), seed=0)(images)


@pytest.mark.parametrize(
    ("takes", "came", "advice"),
    [
        (1, 3, r"expected \(B,1,H,W\).*images\.mean\(dim=1, keepdim=True\)"),
        (12, 3, r"expected \(B,12,H,W\)"),
        (3, 12, r"expected \(B,3,H,W\)"),
    ],
)
def test_images_with_other_channels_than_the_model_takes_are_refused(takes, came, advice):
    with pytest.raises(InvalidValueError, match=advice):
        safer_tta.adapt(with_channels(takes), predictor="plain")(torch.rand(2, came, 24, 24))


def test_a_convolution_that_is_registered_before_the_first_one_does_not_decide():
    class Reduced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reduce, self.stem = torch.nn.Conv2d(32, 16, 1), torch.nn.Conv2d(3, 32, 3)
            self.norm, self.fc = torch.nn.BatchNorm2d(16), torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.fc(self.norm(self.reduce(self.stem(x))).mean(dim=(2, 3)))

    assert safer_tta.adapt(Reduced())(torch.rand(4, 3, 16, 16)).probs.shape == (4, 4)


def test_a_model_without_convolutions_takes_any_channels():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(5 * 64), torch.nn.Linear(5 * 64, 3))
    assert safer_tta.adapt(model, predictor="plain")(torch.rand(4, 5, 8, 8)).probs.shape == (4, 3)


@pytest.mark.parametrize("key", [None, "image"])
def test_a_stream_takes_batches_that_are_dicts(key):
    stream = batches(2)
    by_tensor = [p.probs for p in adapt_small().stream(stream)]
    named = [{"label": torch.zeros(6), key or "pixel_values": images} for images in stream]
    assert all(map(torch.equal, by_tensor, (p.probs for p in adapt_small().stream(named, key=key))))
    guarded = safer_tta.Guard(adapt_small()).stream(named, key=key)
    assert all(map(torch.equal, by_tensor, (p.probs for p in guarded)))


def test_a_dict_without_the_key_is_refused(images):
    with pytest.raises(InvalidValueError, match=r"a batch has 'image', 'label' and no 'pixel_values'.*key=\.\.\."):
        list(adapt_small().stream([{"image": images, "label": 0}]))
    with pytest.raises(InvalidTypeError, match="key is 'image' and a batch is a tuple"):
        list(adapt_small().stream([(images, 0)], key="image"))


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        ({"pixel_values": 0, "labels": 1}, r"batch\['pixel_values'\]"),
        ((1, 2), r"batch\[0\]"),
        (torch.rand(1, 3, 8, 8).numpy(), "torch.from_numpy"),
    ],
)
def test_the_refusal_of_another_type_names_what_mends_it(batch, advice):
    with pytest.raises(InvalidTypeError, match=advice):
        check_images(batch)
