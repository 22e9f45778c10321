import torch

from safer_tta.training.trainer import augment
from tests.contract.parts import generator


def repeated(count, side):
    return torch.rand(1, 3, side, side, generator=generator(0)).expand(count, 3, side, side)


def test_one_image_in_ten_is_grey():
    out = augment(repeated(1000, 6), generator(1))
    grey = (out.amax(dim=1) - out.amin(dim=1) < 1e-6).flatten(1).all(dim=1)
    assert 0.06 < grey.double().mean() < 0.14  # four standard deviations about 0.1


def test_every_image_has_its_own_draw():
    images = repeated(8, 20)
    out = augment(images, generator(1))
    assert out.shape == images.shape
    assert 0 <= out.min() <= out.max() <= 1
    assert len({tuple(o.flatten()[:5].tolist()) for o in out}) == 8
    assert torch.equal(out, augment(images, generator(1)))
