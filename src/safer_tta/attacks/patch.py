"""An adversarial patch (Brown et al., 2017, without their one patch for all images): a small square of any values.

Each image has a square of its own at a random place, and gradients of the surrogate decide what is in it. The budget is
the area of the square; nothing outside it moves.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from .._internal.checks import share
from ..errors import InvalidValueError
from ..models import Classifier
from .pgd import ascend, check_labels, loss_gradient, undisturbed
from .registry import Threat, register


def patch(
    predict: Callable[[Tensor], Any],
    images: Tensor,
    labels: Tensor,
    *,
    area: float = 0.05,
    step: float = 2 / 255,
    steps: int = 100,
    generator: Generator | None = None,
) -> Tensor:
    """Put a square into each image that makes a model do worse.

    Args:
        predict: A model, a Classifier, a Predictor, or any function from images to class scores.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        area: The share of an image that its square may cover.
        step: The size of a step.
        steps: The number of steps.
        generator: Decides the places and the random start; it is on the CPU.

    Returns:
        Images with squares on 8-bit values; all else is as it was.
    """
    check_labels(labels, images)
    side = _side(images, area)
    images = images / 255 if images.dtype == torch.uint8 else images.detach()
    inside = random_squares(images, side, generator)

    def gradient(perturbed: Tensor) -> Tensor:
        return loss_gradient(predict, torch.where(inside, perturbed, images), labels)

    with undisturbed(predict):
        found = ascend(gradient, images, eps=1.0, step=step, steps=steps, norm="linf", generator=generator)
    return torch.where(inside, found, images)


def beyond_square(change: Tensor, threat: Threat) -> str | None:
    """Say how a change reaches beyond a square of the allowed area; None if it does not."""
    allowed = _side(change, threat["area"])
    changed = change.ne(0).any(dim=1)
    reach = max(_reach(changed.any(dim=2)), _reach(changed.any(dim=1)))
    return f"changed a square of {reach} pixels a side; allowed are {allowed}" if reach > allowed else None


@register("patch", steps=100, norms=(), options={"area": 0.05}, exceeds=beyond_square)
def attack_surrogate(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return patch(model, images, labels, generator=randomness, **threat)


def random_squares(images: Tensor, side: int, generator: Generator | None) -> Tensor:
    """Return a mask (B,1,H,W) with a square at a random place for each image."""
    batch, _, height, width = images.shape
    inside = []
    for length in (height, width):
        first = torch.randint(length - side + 1, (batch, 1), generator=generator)
        place = torch.arange(length)
        inside.append((place >= first) & (place < first + side))
    rows, columns = inside
    return (rows[:, None, :, None] & columns[:, None, None, :]).to(images.device)


def _side(images: Tensor, area: float) -> int:
    """Return the side of a square in pixels that covers this share of an image at most."""
    share(area=area)
    height, width = images.shape[2:]
    side = min(math.isqrt(int(area * height * width)), height, width)
    if side < 1:
        raise InvalidValueError(f"area is {area:g}, less than a pixel of {height}x{width}; expected a larger share")
    return side


def _reach(changed: Tensor) -> int:
    """Return the most places that lie between the first and the last changed one of an image, with both."""
    place = torch.arange(1, changed.shape[1] + 1, device=changed.device)
    last = (changed * place).amax(dim=1)
    first = torch.where(changed, place, place[-1] + 1).amin(dim=1)
    return int((last - first + 1).max())
