"""Training augmentation: random resized crop of 0.7 to 1, flip, colour jitter of 0.3 with hue, grey for one in ten."""

from __future__ import annotations

from torch import Generator, Tensor

from ..views.augment import crop_and_flip, jitter, sometimes_grey


def augment(images: Tensor, generator: Generator) -> Tensor:
    """Return images (B,3,H,W) in [0,1] as training sees them."""
    images = crop_and_flip(images, generator, smallest=0.7)
    images = jitter(images, generator, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3)
    return sometimes_grey(images, generator, chance=0.1)
