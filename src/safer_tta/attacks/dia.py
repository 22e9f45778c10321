"""DIA, the distributing invading attack (Wu et al., ICML 2023): some images of a batch harm the answers to the others.

A model that normalises with the batch, or learns from it, shows every image to all others. The attacker owns a few
images of the batch, knows the model and the defence, and changes only these. They climb the loss of everybody else's:
the sum of their cross-entropies, each counted up to 5. With a target, one of the others is led to a class instead.
The defender's own update is not differentiated.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .._internal.checks import count
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError
from ..models.norm import exact_gradients
from ..predictors import Predictor
from .attacker import check_mine
from .goals import check_target, cross_entropy
from .pgd import ascend, check_labels
from .registry import register

MOST = 5.0  # of the loss of one image: beyond it, more is gained from another one
GREY = 0.5  # every pixel at the start of an attack without a budget, as the authors have it


def dia(
    predictor: Predictor,
    images: Tensor,
    labels: Tensor,
    mine: Tensor,
    *,
    draws: int = 1,
    target: str | None = None,
    eps: float = 1.0,
    step: float = 1 / 255,
    steps: int = 100,
    norm: str = "linf",
    generator: Generator | None = None,
) -> Tensor:
    """Poison a batch through a predictor as it stands now.

    Args:
        predictor: What is attacked, such as `adapted.predictor`.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        mine: Which images are the attacker's, (B,) of bool.
        draws: Over how many draws of the views each gradient is averaged.
        target: "next" leads the first image that is not the attacker's to the class after its own; None harms all that
            are not the attacker's.
        eps: The budget in pixel values of [0,1]. 1 allows every image; the attack then starts from grey ones.
        step: The size of a step.
        steps: The number of steps.
        norm: "linf" or "l2".
        generator: The attacker's own, on the CPU.

    Returns:
        The batch, with the attacker's images changed within the budget, on 8-bit values.
    """
    count(draws=draws)
    check_target(target)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(f"predictor is {type(predictor).__name__}; expected a Predictor: adapted.predictor")
    check_labels(labels, images)
    check_mine(mine, labels)
    images = images / 255 if images.dtype == torch.uint8 else images.detach()
    if not bool(mine.any()) or bool(mine.all()):  # the attacker owns no image, or there is no image of others
        return images
    known = predictor.fork(seed=draw_seed(generator), validate=False)  # what is made here is in range by construction
    mine, labels = mine.to(images.device), labels.to(images.device)

    def gradient(own: Tensor) -> Tensor:
        total = torch.zeros_like(own)
        for _ in range(draws):
            total += _gradient(known, images, own, labels, mine, target)
        return total / draws

    first = torch.full_like(images[mine], GREY) if eps >= 1 and norm == "linf" else None
    threat: dict[str, Any] = {"eps": eps, "step": step, "steps": steps, "norm": norm}
    with exact_gradients(known.classifier.norms()):
        own = ascend(gradient, images[mine], first=first, generator=generator, **threat)
    return images.index_put((mine,), own)


@register("dia", live=True, poisons=True, steps=100, options={"draws": 1, "target": None})
def attack_neighbours(
    model: Predictor, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator, mine: Tensor
) -> Tensor:
    return dia(model, images, labels, mine, generator=randomness, **threat)


def _gradient(
    predictor: Predictor, images: Tensor, own: Tensor, labels: Tensor, mine: Tensor, target: str | None
) -> Tensor:
    """Return the gradient of the others' loss with respect to the attacker's images; with a target, the way to it."""
    with torch.inference_mode(False), torch.enable_grad():
        own = own.detach().clone().requires_grad_(True)
        batch = images.index_put((mine,), own)
        logits = predictor(batch, predictor.draw(batch), track=False).logits.float()
        others, classes = logits[~mine], labels[~mine]
        if target is None:
            loss = F.cross_entropy(others, classes, reduction="none").clamp(max=MOST).sum()
        else:
            loss = cross_entropy(others[:1], classes[:1], target)
        return torch.autograd.grad(loss, own)[0]
