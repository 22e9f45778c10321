"""APGD against random defences (Croce and Hein, 2020): AutoAttack's version "rand", through the deployed predictor.

APGD chooses its own steps: it halves them where the loss stops growing. In this version each gradient is averaged over
20 fresh draws, first on the cross-entropy, then on the difference of logits ratio (DLR).
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from .._internal.checks import count
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError
from ..models.norm import exact_gradients
from ..predictors import Predictor, check_images
from .autoattack import LOG, NORMS, load_package
from .eot_margin import JUDGES, Aim
from .pgd import BALLS, check_labels, check_threat
from .registry import register

LOSSES = {"ce": 2, "dlr": 3}  # and the classes that each needs at least


def apgd_eot(
    predictor: Predictor,
    images: Tensor,
    labels: Tensor,
    *,
    draws: int = 20,
    steps: int = 100,
    eps: float = 8 / 255,
    norm: str = "linf",
    generator: Generator | None = None,
) -> Tensor:
    """Attack a batch through a predictor as it stands now, with APGD of the package pyautoattack (extra `[attacks]`).

    The package takes images out of the batch once they are misread. Here all stay, since a predictor may compare the
    images of a batch; of all images that were found, the best are kept, judged by fresh draws.

    Args:
        predictor: What is attacked, such as `Safer(model)` or `adapted.predictor`.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        draws: Over how many draws of the views each gradient is averaged.
        steps: The number of steps for each of the two losses.
        eps: The budget in pixel values of [0,1].
        norm: "linf" or "l2".
        generator: The attacker's own, on the CPU.

    Returns:
        Attacked images on 8-bit values, within the budget.
    """
    count(draws=draws)
    check_threat(eps=eps, step=eps, steps=steps, norm=norm)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(
            f"predictor is {type(predictor).__name__}; expected a Predictor. Attack a model with autoattack"
        )
    check_labels(labels, images)
    check_images(images)
    known = predictor.fork(seed=draw_seed(generator), validate=False)  # perturbed images are in range by construction
    cuda = [images.device] if images.is_cuda else []
    own_randomness = torch.random.fork_rng(cuda)
    with own_randomness, exact_gradients(known.classifier.norms()), torch.inference_mode(False):
        torch.manual_seed(draw_seed(generator))
        images = images / 255 if images.dtype == torch.uint8 else images.detach().clone()
        images = images.contiguous()  # as the package wants them
        labels = labels.to(images.device, copy=True)
        judges = [known.draw(images) for _ in range(JUDGES)]
        made = _search(known, images, labels, n_iter=steps, eot_iter=draws, eps=eps, norm=NORMS[norm])
        return Aim(known, labels).best((BALLS[norm].round(images, found, eps) for found in made), judges)


@register("apgd-eot", live=True, own_steps=True, steps=100, passes=6, options={"draws": 20, "steps": 100})
def attack_predictor(
    model: Predictor, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    return apgd_eot(model, images, labels, generator=randomness, **threat)


def _search(predictor: Predictor, images: Tensor, labels: Tensor, **settings: Any) -> Iterator[Tensor]:
    """Yield for each loss the images of the highest loss, and the last ones that were misread."""

    def predict(perturbed: Tensor) -> Tensor:
        return predictor(perturbed, predictor.draw(perturbed), track=False).logits.float()

    package, log = load_package(), logging.getLogger(LOG)
    for loss, classes in LOSSES.items():
        if predictor.classifier.num_classes >= classes:
            apgd = package.autopgd_base.APGDAttack(predict, loss=loss, device=images.device, logger=log, **settings)
            apgd.init_hyperparam(images)
            highest, _, _, misread = apgd.attack_single_run(images, labels)
            yield from (highest.detach(), misread.detach())
