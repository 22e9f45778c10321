"""Views that methods make themselves, each as its paper has them. Replayable: a draw holds the seed they start from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..predictors import Draw, Predictor
from ..views.augment import crop_and_flip, flips, jitter, uniform, warp
from ..views.operators import OPERATORS


class Seeded(NamedTuple):
    """The predictor's own draw, and a seed for the method's."""

    draw: Draw
    seed: int

    def generator(self) -> Generator:
        return torch.Generator().manual_seed(self.seed)


def seeded(predictor: Predictor, images: Tensor) -> Seeded:
    draw = predictor.draw(images)
    return Seeded(draw, int(torch.randint(2**62, (), generator=predictor.generator)))


def easy(images: Tensor, generator: Generator) -> Tensor:
    """TeSLA's: a random resized crop of 80 to 100 %, mirrored half of the time."""
    return crop_and_flip(images, generator, smallest=0.8)


def strong(images: Tensor, generator: Generator) -> Tensor:
    """CoTTA's, and RoTTA's: colour jitter, a small affine map, blur, flip, noise."""
    count = len(images)
    images = jitter(images, generator, brightness=0.4, contrast=0.3, saturation=0.5, hue=0.06)
    images = images.clamp_min(1e-6) ** uniform(0.7, 1.3, count, generator).to(images).view(-1, 1, 1, 1)
    angle = uniform(-math.pi / 12, math.pi / 12, count, generator)
    scale, mirrored = 1 / uniform(0.9, 1.1, count, generator), flips(count, generator)
    across, down = uniform(-1 / 8, 1 / 8, count, generator), uniform(-1 / 8, 1 / 8, count, generator)
    ratio = images.shape[2] / images.shape[3]
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    images = warp(images, [cosine * mirrored, -sine * ratio, across, sine * mirrored / ratio, cosine, down])
    images = OPERATORS["gaussian_blur"](images, uniform(0.05, 0.5, count, generator))
    noise = torch.randn(images.shape, generator=generator).to(images)
    return (images + 0.005 * noise).clamp(0, 1)


CHAIN = ("equalize", "posterize", "solarize", "rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def augmix(image: Tensor, count: int, generator: Generator) -> Tensor:
    """MEMO's: `count` AugMix versions (Hendrycks et al., 2020) of one image (3,H,W).

    Crop and flip, then a random mixture of three chains of one to three operators, mixed with the image itself.
    """
    images = crop_and_flip(image.expand(count, *image.shape), generator, smallest=0.3)
    shares = torch.rand(count, 3, generator=generator).clamp_min(1e-6).log().neg()  # Dirichlet(1, 1, 1)
    shares = (shares / shares.sum(dim=1, keepdim=True)).to(images)
    mixed = torch.zeros_like(images)
    for chain in range(3):
        view = images
        for index in torch.randint(
            len(CHAIN), (int(torch.randint(1, 4, (), generator=generator)),), generator=generator
        ):
            operator = OPERATORS[CHAIN[index]]
            view = operator(view, operator.sample(count, generator))
        mixed = mixed + shares[:, chain].view(-1, 1, 1, 1) * view
    share = torch.rand(count, generator=generator).to(images).view(-1, 1, 1, 1)  # Beta(1, 1)
    return (share * images + (1 - share) * mixed).clamp(0, 1)
