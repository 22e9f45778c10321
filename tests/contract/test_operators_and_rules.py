"""One contract for every registered operator, preset, pooling rule and mixing."""

import pytest
import torch

from safer_tta import mixing, pooling
from safer_tta.views import OPERATORS, PRESETS, Pipeline
from tests.conftest import SMOOTHING, batches
from tests.contract.parts import BAD_BATCHES, DEVICES, generator


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
class TestOperator:
    def apply(self, name, images, seed=0):
        operator = OPERATORS[name]
        values = operator.sample(len(images), generator(seed))
        noise = torch.Generator(images.device).manual_seed(seed) if operator.random else None
        return operator(images, values, generator=noise)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_keeps_shape_dtype_device_and_range(self, name, device, dtype):
        if device == "mps" and dtype == torch.float64:
            pytest.skip("mps has no float64")
        images = batches(1, side=19)[0].to(device, dtype)
        out = self.apply(name, images)
        assert (out.shape, out.dtype, out.device) == (images.shape, images.dtype, images.device)
        assert 0 <= out.min() <= out.max() <= 1

    def test_same_seed_same_result(self, name, device):
        images = batches(1)[0].to(device)
        assert torch.equal(self.apply(name, images), self.apply(name, images))

    def test_leaves_its_input_alone(self, name, device):
        images = batches(1)[0].to(device)
        kept = images.clone()
        self.apply(name, images)
        assert torch.equal(images, kept)

    def test_images_do_not_mix(self, name, device):
        operator, images = OPERATORS[name], batches(1)[0].to(device)
        if operator.random:
            pytest.skip("noise is drawn for the whole batch at once")
        values = operator.sample(len(images), generator())
        alone = operator(images[2:3], None if values is None else values[2:3])
        assert torch.allclose(operator(images, values)[2:3], alone, atol=1e-6)

    def test_gradient_reaches_the_image(self, name, device):
        images = (batches(1)[0] * 0.5 + 0.2).to(device).requires_grad_(True)
        self.apply(name, images).square().sum().backward()
        assert torch.isfinite(images.grad).all()
        assert images.grad.abs().sum() > 0

    def test_a_grey_image_is_a_colour_image_with_equal_channels(self, name, device):
        images = batches(1)[0][:, :1].to(device)
        if OPERATORS[name].random:
            assert self.apply(name, images).shape == images.shape
        else:
            colour = self.apply(name, images.expand(-1, 3, -1, -1))
            torch.testing.assert_close(self.apply(name, images), colour[:, :1], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("bad", ["four channels", "one image without batch", "int64"])
    def test_refuses(self, name, device, bad):
        values = OPERATORS[name].sample(2, generator())
        with pytest.raises(ValueError, match="expected"):
            OPERATORS[name](BAD_BATCHES[bad].to(device), values)

    def test_refuses_values_of_another_batch(self, name, device):
        with pytest.raises(ValueError, match="expected"):
            OPERATORS[name](batches(1)[0].to(device), torch.rand(3))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("preset", PRESETS)
def test_pipelines_smooth_and_never_repeat_an_operator(preset, count):
    pipeline, seeds = Pipeline(preset, max_operators=count), generator()
    for _ in range(50):
        (steps,) = pipeline.draw(1, 4, seeds).pipelines
        names = [step.name for step in steps]
        assert len(names) == len(set(names)) == count
        assert SMOOTHING & set(names)


def views(count: int = 5, size: int = 6, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.randn(count, size, classes, generator=generator(1)).softmax(-1)
    features = torch.randn(size, 8, generator=generator(2)) + torch.randn(count, size, 8, generator=generator(3))
    return probs, features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", pooling.RULES)
class TestRule:
    def test_weights_share_one(self, name, dtype):
        probs, features = (t.to(dtype) for t in views())
        weights = pooling.weights(name, probs, features)
        assert weights.shape == probs.shape[:2]
        assert (weights >= 0).all()
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(weights.sum(0), torch.ones(6, dtype=dtype), atol=tolerance)

    @pytest.mark.parametrize("count", [1, 2])
    def test_few_views(self, name, dtype, count):
        probs, features = (t.to(dtype) for t in views(count))
        assert torch.isfinite(pooling.weights(name, probs, features)).all()

    def test_order_of_images_does_not_matter(self, name, dtype):
        probs, features = (t.to(dtype) for t in views())
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        mixed = pooling.weights(name, probs[:, order], features[:, order])
        assert torch.allclose(mixed, pooling.weights(name, probs, features)[:, order], atol=1e-2)

    def test_refuses_what_does_not_belong_together(self, name, dtype):
        with pytest.raises(ValueError, match="expected"):
            pooling.weights(name, views(5)[0], views(4)[1])


@pytest.mark.parametrize("name", mixing.MIXINGS)
@pytest.mark.parametrize("extra", [None, 0, 1, 4])
def test_mixing_weights_share_one(name, extra):
    """With no augmented view, with as few as it takes, and with more."""
    mixer = mixing.create(name)
    probs, features = views(1 if extra is None else 1 + mixer.least_views + extra)
    verdict = mixer.weigh(
        pooling.weights("cc_drop", probs, features), probs, features, torch.zeros(mixer.memory_size(features.shape[2]))
    )
    for weights in filter(lambda given: given is not None, (verdict.answer, verdict.lesson, verdict.aligned)):
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(0), torch.ones(6), atol=1e-6)
    figures = [verdict.suspicion] if verdict.suspicion is not None else list(verdict.signals.values())
    assert all(figure.shape == (6,) for figure in figures)
    assert len(figures) == 1 or len(probs) == 1
    assert (verdict.suspicion is not None) == (mixer.estimates_suspicion and len(probs) > 1)
    assert mixing.settings(mixing.create(mixing.settings(mixer))) == mixing.settings(mixer)
