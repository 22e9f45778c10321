"""Augmentations that training and some methods share; batched, with one draw for every image.

They are not SAFER's operators: they interpolate between pixels and reflect at borders, where those take the nearest
pixel and fill with black.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .operators import OPERATORS, grey


def uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    """Draw `count` numbers from `low` to `high`."""
    return torch.rand(count, generator=generator) * (high - low) + low


def crop_and_flip(images: Tensor, generator: Generator, *, smallest: float) -> Tensor:
    """Crop at least `smallest` of the area at slightly other proportions, resize, and mirror half of the images."""
    count = len(images)
    area, ratio = uniform(smallest, 1, count, generator), uniform(-0.288, 0.288, count, generator).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    across, down = (uniform(-1, 1, count, generator) * (1 - size) for size in (width, height))
    zero = torch.zeros(count)
    return warp(images, [width * flips(count, generator), zero, across, zero, height, down])


def flips(count: int, generator: Generator) -> Tensor:
    """Draw 1 or -1 for every image."""
    return 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()


def warp(images: Tensor, rows: list[Tensor]) -> Tensor:
    """Fetch images from affine windows: six numbers for each image, in half sides from the centre."""
    window = torch.stack(rows, dim=1).view(-1, 2, 3).to(images)
    grid = F.affine_grid(window, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def jitter(
    images: Tensor, generator: Generator, *, brightness: float, contrast: float, saturation: float, hue: float
) -> Tensor:
    """Change colours by random factors in 1 ± strength; the hue is in turns of the colour circle."""
    for name, strength in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
        images = OPERATORS[name](images, uniform(1 - strength, 1 + strength, len(images), generator))
    return turn_hue(images, uniform(-hue, hue, len(images), generator))


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate every colour about the grey axis, by one matrix for each image. Grey images have no hue."""
    if images.shape[1] == 1:
        return images
    angle = (turns * 2 * math.pi).to(images).view(-1, 1, 1)
    third = torch.full((3, 3), 1 / 3, device=images.device, dtype=images.dtype)
    across = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=images.device, dtype=images.dtype)
    eye = torch.eye(3, device=images.device, dtype=images.dtype)
    matrix = angle.cos() * (eye - third) + third + angle.sin() * across / math.sqrt(3)
    return (matrix @ images.flatten(2)).view_as(images).clamp(0, 1)


def sometimes_grey(images: Tensor, generator: Generator, *, chance: float) -> Tensor:
    """Turn images grey with this probability."""
    chosen = (torch.rand(len(images), generator=generator) < chance).to(images.device).view(-1, 1, 1, 1)
    return torch.where(chosen, grey(images), images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch every channel of every image to the whole range."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp_min(1e-6), images)
