"""Attacks on the attacker's own models that carry over to others: three refinements of PGD, each of which can be off.

Momentum (Dong et al., 2018) remembers the gradients of earlier steps, each divided by its mean absolute value. Input
diversity (Xie et al., 2019) asks the model about a copy that is randomly shrunk and padded. Translation invariance
(Dong et al., 2019) smooths the gradient, as if it were averaged over shifted images. Several models are attacked
through the mean of their scores.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .._internal.checks import share
from ..errors import InvalidValueError
from ..models import Classifier
from .goals import check_target
from .pgd import Budget, ascend, check_labels, loss_gradient, scores, undisturbed
from .registry import register

Predict = Callable[[Tensor], Any]
BUDGET: Budget = {"eps": 8 / 255, "step": 2 / 255, "steps": 20, "norm": "linf"}
SMALLEST = 0.9  # of a shrunk image, as a share of the side
KERNEL = 0.05  # the width of the Gaussian kernel as a share of the side: 15 of 299 pixels in the paper
DEVIATIONS = 3  # the standard deviations from the middle of the kernel to its border


def transfer(
    predict: Predict | Sequence[Predict],
    images: Tensor,
    labels: Tensor,
    *,
    momentum: float = 1.0,
    diversity: float = 0.5,
    smoothing: float = KERNEL,
    target: str | None = None,
    generator: Generator | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """Make images on one or several models of the attacker's that other models misread too.

    Args:
        predict: A model, a Classifier or a function from images to class scores, or a list of several.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        momentum: The share of what was remembered that is kept in every step; 0 switches momentum off.
        diversity: The probability with which images are shrunk and padded; 0 switches it off.
        smoothing: The width of the Gaussian kernel as a share of the image's side; 0 switches smoothing off.
        target: "next" leads every image to the class after its own; None to any wrong class.
        generator: Decides the random start and the shrinking; it is on the CPU.
        **budget: `eps`, `step`, `steps` and `norm`, as `pgd` takes them; by default 8/255, 2/255, 20 and "linf".

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    share(momentum=momentum, diversity=diversity, smoothing=smoothing)
    check_target(target)
    check_labels(labels, images)
    models: list[Predict] = [predict] if callable(predict) else list(predict)
    if not models:
        raise InvalidValueError("predict is an empty list; expected at least one model")

    def mean_scores(perturbed: Tensor) -> Tensor:
        answers = [scores(model, diversify(perturbed, diversity, generator)) for model in models]
        return torch.stack(answers).mean(dim=0)

    def gradient(perturbed: Tensor) -> Tensor:
        return smooth(loss_gradient(mean_scores, perturbed, labels, target=target), smoothing)

    with contextlib.ExitStack() as modes:
        for model in models:
            modes.enter_context(undisturbed(model))
        return ascend(gradient, images, momentum=momentum, generator=generator, **(BUDGET | budget))


@register("transfer", options={"momentum": 1.0, "diversity": 0.5, "smoothing": KERNEL, "target": None})
def attack_surrogate(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return transfer(model, images, labels, generator=randomness, **threat)


def diversify(images: Tensor, probability: float, generator: Generator | None) -> Tensor:
    """Shrink all images by one random factor and pad them with black to their size, with this probability."""
    chance, factor, down, right = torch.rand(4, generator=generator).tolist()
    if chance >= probability:
        return images
    sides = images.shape[-2:]
    height, width = (round(side * (SMALLEST + (1 - SMALLEST) * factor)) for side in sides)
    top, left = int(down * (sides[0] - height + 1)), int(right * (sides[1] - width + 1))
    shrunk = F.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
    return F.pad(shrunk, (left, sides[1] - width - left, top, sides[0] - height - top))


def smooth(gradient: Tensor, width: float) -> Tensor:
    """Return a gradient after a Gaussian kernel of this width, a share of the shorter side."""
    radius = round(width * min(gradient.shape[-2:]) / 2)
    if radius == 0:
        return gradient
    places = torch.linspace(-DEVIATIONS, DEVIATIONS, 2 * radius + 1, dtype=gradient.dtype, device=gradient.device)
    line = torch.exp(-places.square() / 2)
    line = (line / line.sum()).expand(gradient.shape[1], 1, 1, -1)
    channels = len(line)
    across = F.conv2d(gradient, line, padding=(0, radius), groups=channels)
    return F.conv2d(across, line.transpose(2, 3), padding=(radius, 0), groups=channels)
