"""Test how far the methods' own augmentations move an image; tests/parity compares them with their papers' code."""

import pytest
import torch

from safer_tta.methods._frame.augmentations import CHAIN, augmix, strong


@pytest.mark.parametrize("operation", CHAIN[4:])
def test_augmix_at_severity_one_hardly_moves_anything(operation):
    """At most 3 whole degrees, 3 % of shear, a thirtieth of the side: a dot near the rim moves by a pixel or two."""
    dot = torch.zeros(2, 3, 33, 33)
    dot[:, :, 3:6, 15:18] = 1.0
    moved = operation(dot, torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]))
    rows, columns = torch.meshgrid(torch.arange(33.0), torch.arange(33.0), indexing="ij")
    for image in moved[:, 0]:
        where = [float((image * axis).sum() / image.sum()) for axis in (rows, columns)]
        assert abs(where[0] - 4) <= 2
        assert abs(where[1] - 16) <= 2


def test_augmix_makes_every_copy_differently():
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    versions = augmix(image, 16, torch.Generator().manual_seed(0))
    assert ((versions >= 0) & (versions <= 1)).all()
    assert len({version.sum().item() for version in versions}) == 16


def test_strong_views_shift_by_an_eighth_of_the_side():
    """A dot in the middle stays within an eighth of the side, a tenth of zoom and 15 degrees: 32 px, 4 px, a little."""
    dot = torch.zeros(200, 3, 33, 33)
    dot[:, :, 15:18, 15:18] = 1.0
    seen = strong(dot, torch.Generator().manual_seed(0)).mean(dim=1).flatten(1).argmax(dim=1)
    away = torch.maximum((seen // 33 - 16).abs(), (seen % 33 - 16).abs())
    assert 3 <= int(away.max()) <= 6
