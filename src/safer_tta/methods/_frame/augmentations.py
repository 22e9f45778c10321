"""Augmentations that methods use themselves, as their papers have them; a draw holds the seed they start from."""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ...views.augment import autocontrast, crop_and_flip, flips, jitter, uniform, warp
from ...views.operators import OPERATORS

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def easy(images: Tensor, generator: Generator) -> Tensor:
    """Crop 80 to 100 % of the area at random, and mirror half of the time: TeSLA's easy augmentation."""
    return crop_and_flip(images, generator, smallest=0.8)


def strong(images: Tensor, generator: Generator) -> Tensor:
    """The augmentation of CoTTA and RoTTA: colour jitter, a small affine map, blur, flip, noise."""
    count = len(images)
    images = jitter(images, generator, brightness=0.4, contrast=0.3, saturation=0.5, hue=0.06)
    images = images.clamp_min(1e-6) ** uniform(0.7, 1.3, count, generator).to(images).view(-1, 1, 1, 1)
    angle = uniform(-math.pi / 12, math.pi / 12, count, generator)
    scale, mirrored = 1 / uniform(0.9, 1.1, count, generator), flips(count, generator)
    # An eighth of the side either way, in warp's units of half a side.
    across, down = uniform(-0.25, 0.25, count, generator), uniform(-0.25, 0.25, count, generator)
    ratio = images.shape[2] / images.shape[3]
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    images = warp(images, [cosine * mirrored, -sine * ratio, across, sine * mirrored / ratio, cosine, down])
    images = OPERATORS["gaussian_blur"](images, uniform(0.05, 0.5, count, generator))
    noise = torch.randn(images.shape, generator=generator).to(images)
    return (images + 0.005 * noise).clamp(0, 1)


def _sheared(axis: str) -> Operation:
    return lambda images, level, sign: OPERATORS[axis](images, sign * torch.rad2deg(torch.atan(0.03 * level)))


def _shifted(axis: str, side: int) -> Operation:
    return lambda images, level, sign: OPERATORS[axis](
        images, sign * torch.floor(level * images.shape[side] / 30) / images.shape[side]
    )


# AugMix's operators at severity 1, as MEMO uses them: a level of 0.1 to 1 of ten, and a sign where there are two ways.
CHAIN: tuple[Operation, ...] = (
    lambda images, level, sign: autocontrast(images),
    lambda images, level, sign: OPERATORS["equalize"](images, None),
    lambda images, level, sign: OPERATORS["posterize"](images, torch.full_like(level, 4.0)),
    lambda images, level, sign: OPERATORS["solarize"](images, 1 - torch.floor(25.6 * level) / 256),
    lambda images, level, sign: OPERATORS["rotate"](images, sign * torch.floor(3 * level)),
    _sheared("shear_x"),
    _sheared("shear_y"),
    _shifted("translate_x", 3),
    _shifted("translate_y", 2),
)


def augmix(image: Tensor, count: int, generator: Generator) -> Tensor:
    """Return `count` AugMix versions, as MEMO uses them (Hendrycks et al., 2020), of one image (3,H,W).

    Crop and flip, then a random mixture of three chains of one to three operators, mixed with the image itself.
    """
    images = crop_and_flip(image.expand(count, *image.shape), generator, smallest=0.08)
    shares = torch.rand(count, 3, generator=generator).clamp_min(1e-6).log().neg()  # Dirichlet(1, 1, 1)
    shares = (shares / shares.sum(dim=1, keepdim=True)).to(images)
    mixed = torch.zeros_like(images)
    for chain in range(3):
        mixed = mixed + shares[:, chain].view(-1, 1, 1, 1) * _chained(images, generator)
    share = torch.rand(count, generator=generator).to(images).view(-1, 1, 1, 1)  # Beta(1, 1)
    return (share * images + (1 - share) * mixed).clamp(0, 1)


def _chained(images: Tensor, generator: Generator) -> Tensor:
    """Pass every image through one to three operators that are drawn for it."""
    count = len(images)
    depth = torch.randint(1, 4, (count,), generator=generator)
    for place in range(3):
        chosen = torch.randint(len(CHAIN), (count,), generator=generator)
        level, sign = uniform(0.1, 1.0, count, generator), 2.0 * torch.randint(2, (count,), generator=generator) - 1
        images = images.clone()
        for index, operation in enumerate(CHAIN):
            rows = torch.nonzero((chosen == index) & (place < depth)).flatten()
            if len(rows):
                images[rows] = operation(images[rows], level[rows], sign[rows])
    return images
