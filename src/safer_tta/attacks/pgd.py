"""Projected gradient descent (Madry et al., 2018) in pixel space, under an l∞ or an l2 budget.

It starts at random, takes `steps` steps and projects after each. The result is what a camera could have delivered: it
has 8-bit values, and the budget holds after that rounding too. The model's mode, gradients and statistics stay as they
were.
"""

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch
from torch import Generator, Tensor, nn

from .._internal.checks import count, one_of
from .._internal.seeds import draw_seed
from .._internal.temporary import temporarily
from ..errors import InvalidTypeError, InvalidValueError
from ..models import Classifier
from ..predictors import Prediction, Predictor, check_images
from .goals import cross_entropy
from .registry import register

Gradient = Callable[[Tensor], Tensor]


class Budget(TypedDict, total=False):
    """How far an attack may go, and in what steps; `pgd` says what each of them is."""

    eps: float
    step: float
    steps: int
    norm: str


LEVELS = 255
TINY = 1e-30  # below any gradient, also that of a model which is very sure
SLACK = 1e-4  # of one level: 8-bit values divided by 255 come back from float32 this exactly


def pgd(
    predict: Callable[[Tensor], Any],
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    step: float,
    steps: int,
    norm: str = "linf",
    generator: Generator | None = None,
) -> Tensor:
    """Search near images for ones on which a model does worse. One step of size `eps` is FGSM.

    Args:
        predict: A model, a Classifier, a Predictor, or any function from images to class scores. A Predictor is asked
            with the draw that it would make next, the same at every step; `eot_pgd` draws afresh.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        eps: The budget in pixel values of [0,1], such as 8/255.
        step: The size of a step, such as 2/255.
        steps: The number of steps.
        norm: "linf" or "l2".
        generator: Decides the random start; it is on the CPU.

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    gradient = functools.partial(loss_gradient, predict, labels=labels)
    check_labels(labels, images)
    with undisturbed(predict):
        return ascend(gradient, images, eps=eps, step=step, steps=steps, norm=norm, generator=generator)


@register("pgd")
def attack_surrogate(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return pgd(model, images, labels, generator=randomness, **threat)


def ascend(
    gradient: Gradient,
    images: Tensor,
    *,
    eps: float,
    step: float,
    steps: int,
    norm: str,
    generator: Generator | None,
    first: Tensor | None = None,
    momentum: float = 0.0,
) -> Tensor:
    """Climb a gradient inside the ball of radius eps around the images, from `first` or at random, to 8-bit values.

    With momentum (Dong et al., 2018), a step follows the sum of all gradients so far, each divided by its mean absolute
    value; of the sum before it, every step keeps the share `momentum`.
    """
    check_threat(eps=eps, step=step, steps=steps, norm=norm)
    check_images(images, channels=())
    ball = BALLS[norm]
    images = images / LEVELS if images.dtype == torch.uint8 else images.detach()
    perturbed = images + ball.start(_uniform(images, generator), eps) if first is None else first
    perturbed = perturbed.clamp(0, 1)
    kept = torch.zeros_like(perturbed)
    for _ in range(steps):
        uphill = gradient(perturbed)
        if momentum:
            uphill = kept = momentum * kept + uphill / uphill.abs().mean(dim=(1, 2, 3), keepdim=True).clamp_min(TINY)
        moved = perturbed + step * ball.direction(uphill)
        perturbed = (images + ball.project(moved - images, eps)).clamp(0, 1)
    return ball.round(images, perturbed, eps)


def _uniform(like: Tensor, generator: Generator | None) -> Tensor:
    """Draw random numbers on the images' device. On the host of a GPU this would take longer than a step."""
    if like.device.type == "cpu":
        return torch.rand(like.shape, generator=generator, dtype=torch.float32).to(like)
    own = torch.Generator(like.device).manual_seed(draw_seed(generator))
    return torch.rand(like.shape, generator=own, device=like.device, dtype=torch.float32).to(like.dtype)


def loss_gradient(
    predict: Callable[[Tensor], Any], images: Tensor, labels: Tensor, *, target: str | None = None
) -> Tensor:
    """Return the gradient of the summed cross-entropy with respect to the images; with a target, the way to it."""
    with torch.inference_mode(False), torch.enable_grad():
        images = images.detach().clone().requires_grad_(True)
        logits = scores(predict, images).float()
        loss = cross_entropy(logits, labels.to(logits.device, copy=True), target)
        return torch.autograd.grad(loss, images)[0]


def scores(predict: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """Return the class scores of anything that predicts."""
    if hasattr(predict, "state_bytes"):
        raise InvalidTypeError(
            "predict is a method, which would adapt while it is attacked; expected its predictor or a model"
        )
    answer = predict(images, track=False) if isinstance(predict, Predictor) else predict(images)
    if isinstance(answer, Prediction):
        return answer.logits
    scores = answer[1] if isinstance(predict, Classifier) else getattr(answer, "logits", answer)
    if not isinstance(scores, Tensor):
        raise InvalidTypeError(f"predict returned {type(scores).__name__}; expected class scores (B,K)")
    return scores


def check_labels(labels: Any, images: Tensor) -> None:
    """Refuse anything but one class for each image."""
    check_images(images, values=False, channels=())
    wanted = f"a tensor of {len(images)} whole numbers, a class for each image"
    if not isinstance(labels, Tensor):
        raise InvalidTypeError(f"labels are {type(labels).__name__}; expected {wanted}")
    if labels.is_floating_point() or labels.shape != images.shape[:1]:
        raise InvalidTypeError(f"labels are of shape {tuple(labels.shape)}, {labels.dtype}; expected {wanted}")


def check_threat(*, eps: float, step: float, steps: int, norm: str) -> None:
    """Refuse an impossible budget, such as one in levels of 0..255."""
    one_of(BALLS, norm=norm)
    largest = 1.0 if norm == "linf" else math.inf
    for name, value in (("eps", eps), ("step", step)):
        if not 0 < value <= largest:
            raise InvalidValueError(
                f"{name} is {value:g}; expected a positive budget for pixels in [0,1]. For {value:g} of 255 levels "
                f"write {value:g}/255"
            )
    count(steps=steps)


class _Linf:
    @staticmethod
    def start(uniform: Tensor, eps: float) -> Tensor:
        return (2 * uniform - 1) * eps

    @staticmethod
    def direction(gradient: Tensor) -> Tensor:
        return gradient.sign()

    @staticmethod
    def project(delta: Tensor, eps: float) -> Tensor:
        return delta.clamp(-eps, eps)

    @staticmethod
    def round(images: Tensor, perturbed: Tensor, eps: float) -> Tensor:
        """Return the nearest 8-bit values that the budget allows."""
        centre = images.double() * LEVELS
        lowest, highest = torch.ceil(centre - eps * LEVELS - SLACK), torch.floor(centre + eps * LEVELS + SLACK)
        level = (perturbed.double() * LEVELS).round().clamp(min=lowest, max=highest).clamp(0, LEVELS)
        return torch.where(lowest <= highest, level / LEVELS, images.double()).to(images.dtype)


class _L2:
    @staticmethod
    def start(uniform: Tensor, eps: float) -> Tensor:
        direction = 2 * uniform - 1
        return direction / _length(direction) * eps * uniform[:, :1, :1, :1]

    @staticmethod
    def direction(gradient: Tensor) -> Tensor:
        return gradient / _length(gradient)

    @staticmethod
    def project(delta: Tensor, eps: float) -> Tensor:
        return delta * (eps / _length(delta)).clamp(max=1)

    @staticmethod
    def round(images: Tensor, perturbed: Tensor, eps: float) -> Tensor:
        """Return whole levels in the direction of the perturbation, as far as the ball allows.

        Plain rounding would lose most of the perturbation, since a small l2 budget is a fraction of a level per pixel.
        So the direction is stretched by bisection until its rounded version just fits. An image between the levels
        stays as it is if no level is within reach.
        """
        centre = images.double()
        delta = perturbed.double() - centre

        def moved(stretch: Tensor) -> Tensor:
            level = ((centre + stretch * delta) * LEVELS).round().clamp(0, LEVELS)
            return (level / LEVELS).to(images.dtype).double() - centre

        low = torch.zeros(len(images), 1, 1, 1, dtype=torch.float64, device=images.device)
        high = low + LEVELS
        for _ in range(40):
            middle = (low + high) / 2
            fits = _length(moved(middle)) <= eps
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        return torch.where(_length(moved(low)) <= eps, centre + moved(low), centre).to(images.dtype)


BALLS: dict[str, type[_Linf] | type[_L2]] = {"linf": _Linf, "l2": _L2}


def _length(delta: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(delta, dim=(1, 2, 3), keepdim=True)
    return length.clamp_min(1e-12)


def undisturbed(predict: object) -> AbstractContextManager[None]:
    """Put a module into eval mode inside, and give it its own modes back."""
    return temporarily(predict.modules() if isinstance(predict, nn.Module) else [], training=False)
