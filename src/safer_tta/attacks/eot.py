"""Expectation over transformation (Athalye et al., 2018): PGD *through* a defended predictor.

The attacker knows the defence. Every step averages the gradient over K fresh draws of the views, so the randomness of
SAFER hides nothing from it. The predictor itself is not moved: not its generator, statistics or gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ..predictors import Draw, Predictor
from ..seeds import drawn
from .pgd import ascend, check_labels, loss_gradient


def eot_pgd(
    predictor: Predictor,
    images: Tensor,
    labels: Tensor,
    *,
    draws: int,
    eps: float = 8 / 255,
    step: float = 2 / 255,
    steps: int = 10,
    norm: str = "linf",
    generator: Generator | None = None,
) -> Tensor:
    """Attack a batch through the predictor as it stands now. draws: K; generator: the attacker's own, on the CPU."""
    if draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1 (K = 0 is the transferred attack, pgd on a surrogate)")
    if not isinstance(predictor, Predictor):
        raise TypeError(
            f"predictor is {type(predictor).__name__}; expected a Predictor, such as Safer(model) or adapted.predictor"
        )
    check_labels(labels, images)
    known = copy.copy(predictor)
    known.validate = False  # perturbed images are in range by construction
    known.generator = torch.Generator().manual_seed(drawn(generator))

    def gradient(perturbed: Tensor) -> Tensor:
        total = torch.zeros_like(perturbed)
        for _ in range(draws):
            draw = known.draw(perturbed)
            total += loss_gradient(_through(known, draw), perturbed, labels)
        return total / draws

    return ascend(gradient, images, eps=eps, step=step, steps=steps, norm=norm, generator=generator)


def _through(predictor: Predictor, draw: Draw) -> Callable[[Tensor], Tensor]:
    return lambda images: predictor(images, draw, track=False).logits
