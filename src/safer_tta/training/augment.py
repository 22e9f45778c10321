"""Training augmentation, batched and on the device: crop, flip, colour jitter, grey. One draw per image."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..views.operators import OPERATORS, grey

SMALLEST_CROP = 0.7  # share of the area
JITTER = 0.3
GREY = 0.1


def augment(images: Tensor, generator: Generator) -> Tensor:
    """Images (B,3,H,W) in [0,1] as training sees them."""
    return _sometimes_grey(_jitter(_crop_and_flip(images, generator), generator), generator)


def _uniform(low: float, high: float, count: int, generator: Generator) -> Tensor:
    return torch.rand(count, generator=generator) * (high - low) + low


def _crop_and_flip(images: Tensor, generator: Generator) -> Tensor:
    """A window of 70 to 100 % of the area and of slightly other proportions, resized back; half of them mirrored."""
    count = len(images)
    area, ratio = _uniform(SMALLEST_CROP, 1, count, generator), _uniform(-0.288, 0.288, count, generator).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    across, down = (_uniform(-1, 1, count, generator) * (1 - size) for size in (width, height))
    mirrored = 1 - 2 * (torch.rand(count, generator=generator) < 0.5).float()
    zero = torch.zeros(count)
    rows = [width * mirrored, zero, across, zero, height, down]
    window = torch.stack(rows, dim=1).view(count, 2, 3).to(images)
    grid = F.affine_grid(window, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _jitter(images: Tensor, generator: Generator) -> Tensor:
    for name in ("brightness", "contrast", "saturation"):
        images = OPERATORS[name](images, _uniform(1 - JITTER, 1 + JITTER, len(images), generator))
    return _turn_hue(images, _uniform(-JITTER, JITTER, len(images), generator))


def _turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate every colour about the grey axis: linear, so one matrix per image."""
    angle = (turns * 2 * math.pi).to(images).view(-1, 1, 1)
    third = torch.full((3, 3), 1 / 3, device=images.device, dtype=images.dtype)
    across = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=images.device, dtype=images.dtype)
    eye = torch.eye(3, device=images.device, dtype=images.dtype)
    matrix = angle.cos() * (eye - third) + third + angle.sin() * across / math.sqrt(3)
    return (matrix @ images.flatten(2)).view_as(images).clamp(0, 1)


def _sometimes_grey(images: Tensor, generator: Generator) -> Tensor:
    chosen = (torch.rand(len(images), generator=generator) < GREY).to(images.device).view(-1, 1, 1, 1)
    return torch.where(chosen, grey(images), images)
