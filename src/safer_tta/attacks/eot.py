"""Expectation over transformation (Athalye et al., 2018): PGD *through* a defended predictor.

The attacker knows the defence. Every step averages the gradient over K fresh draws of the views, so randomness hides
nothing. The predictor itself is not moved: neither its generator nor its statistics nor its gradients.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from .._internal.checks import count, share
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError
from ..predictors import Predictor
from .goals import check_target
from .pgd import ascend, check_labels, loss_gradient
from .registry import register


def eot_pgd(
    predictor: Predictor,
    images: Tensor,
    labels: Tensor,
    *,
    draws: int,
    momentum: float = 0.0,
    target: str | None = None,
    eps: float = 8 / 255,
    step: float = 2 / 255,
    steps: int = 10,
    norm: str = "linf",
    generator: Generator | None = None,
) -> Tensor:
    """Attack a batch through a predictor as it stands now.

    Args:
        predictor: What is attacked, such as `Safer(model)` or `adapted.predictor`.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        draws: Over how many draws of the views each gradient is averaged (K).
        momentum: The share of earlier gradients that is kept in every step; 0 for none.
        target: "next" leads every image to the class after its own; None to any wrong class.
        eps: The budget in pixel values of [0,1].
        step: The size of a step.
        steps: The number of steps.
        norm: "linf" or "l2".
        generator: The attacker's own, on the CPU.

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    count(draws=draws)
    share(momentum=momentum)
    check_target(target)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(
            f"predictor is {type(predictor).__name__}; expected a Predictor, such as Safer(model) or adapted.predictor"
        )
    check_labels(labels, images)
    known = predictor.fork(seed=draw_seed(generator), validate=False)  # perturbed images are in range by construction

    def gradient(perturbed: Tensor) -> Tensor:
        total = torch.zeros_like(perturbed)
        for _ in range(draws):
            predict = functools.partial(known, draw=known.draw(perturbed), track=False)
            total += loss_gradient(predict, perturbed, labels, target=target)
        return total / draws

    threat: dict[str, Any] = {"eps": eps, "step": step, "steps": steps, "norm": norm}
    return ascend(gradient, images, momentum=momentum, generator=generator, **threat)


@register("eot", live=True, steps=10, options={"draws": 1})
def attack_predictor(
    model: Predictor, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return eot_pgd(model, images, labels, generator=randomness, **threat)
