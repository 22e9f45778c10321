"""TePA, test-time poisoning (Cong et al., S&P 2024): images of which nothing can be learnt but uncertainty.

The attacker has a model of their own, and makes images ahead of the stream of which that model is as unsure as
possible. They are meant for whole batches, sent before those of others: draw "batches-first" or "batches" of a stream.
Momentum and shrunken copies make what is found on one model hold for another.
"""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Generator, Tensor

from .._internal.checks import share
from ..methods._frame.losses import softmax_entropy
from ..models import Classifier
from .pgd import Budget, ascend, scores, undisturbed
from .registry import register
from .transfer import diversify

BUDGET: Budget = {"eps": 32 / 255, "step": 1 / 255, "steps": 200, "norm": "linf"}


def tepa(
    predict: Callable[[Tensor], Any],
    images: Tensor,
    *,
    momentum: float = 1.0,
    diversity: float = 0.5,
    generator: Generator | None = None,
    **budget: Unpack[Budget],
) -> Tensor:
    """Make images of which a model of the attacker's is unsure.

    Args:
        predict: A model, a Classifier, or any function from images to class scores.
        images: (B,3,H,W), floats in [0,1] or uint8.
        momentum: The share of what was remembered that is kept in every step; 0 switches momentum off.
        diversity: The probability with which images are shrunk and padded; 0 switches it off.
        generator: Decides the random start and the shrinking; it is on the CPU.
        **budget: `eps`, `step`, `steps` and `norm`, as `pgd` takes them; by default 32/255, 1/255, 200 and "linf".

    Returns:
        Poisoned images on 8-bit values, within the budget.
    """
    share(momentum=momentum, diversity=diversity)

    def gradient(perturbed: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            perturbed = perturbed.detach().clone().requires_grad_(True)
            logits = scores(predict, diversify(perturbed, diversity, generator)).float()
            return torch.autograd.grad(softmax_entropy(logits).sum(), perturbed)[0]

    with undisturbed(predict):
        return ascend(gradient, images, momentum=momentum, generator=generator, **(BUDGET | budget))


@register(
    "tepa",
    poisons=True,
    eps=BUDGET["eps"],
    step=BUDGET["step"],
    steps=BUDGET["steps"],
    options={"momentum": 1.0, "diversity": 0.5},
)
def poison_ahead(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return tepa(model, images, generator=randomness, **threat)
