"""AutoAttack (Croce and Hein, 2020), standard version, through the package pyautoattack (extra `[attacks]`).

APGD-CE, APGD-T, FAB-T and Square run one after the other, each on the images that withstood those before it.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .._internal.temporary import temporarily
from ..errors import InvalidTypeError, InvalidValueError, MissingPackageError
from ..models import Classifier
from ..predictors import check_images
from .pgd import BALLS, check_threat, scores, undisturbed
from .registry import register

Scores = Callable[[Tensor], Tensor]
COMPONENTS = ("apgd-ce", "apgd-t", "fab-t", "square")
NORMS = {"linf": "Linf", "l2": "L2"}
LEAST_CLASSES = 4
LOG = "auto-attack"  # the name of the package's log


def autoattack(
    model: nn.Module | Classifier,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    norm: str = "linf",
    seed: int = 0,
    batch: int = 64,
    components: tuple[str, ...] = COMPONENTS,
    progress: Callable[[str, float], None] = lambda component, accuracy: None,
) -> tuple[Tensor, dict[str, float]]:
    """Attack images with AutoAttack. An image that the model gets wrong to begin with stays as it is.

    Args:
        model: A model or a Classifier, which must give the same answer every time.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        eps: The budget in pixel values of [0,1].
        norm: "linf" or "l2".
        seed: Decides every draw.
        batch: How many images are attacked at once.
        components: The attacks, in their order.
        progress: Called after every component with its name and the accuracy that is left.

    Returns:
        Attacked images on 8-bit values, and the model's accuracy after each component and after rounding.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"model is {type(model).__name__}; expected a model or a Classifier, which answers the same every "
            "time. Attack a Predictor with eot_pgd"
        )
    check_threat(eps=eps, step=eps, steps=1, norm=norm)
    check_images(images)
    images = images / 255 if images.dtype == torch.uint8 else images.detach()
    labels = labels.to(images.device)
    forward = functools.partial(scores, model)
    cuda = [images.device] if images.is_cuda else []
    learning = [p for p in model.parameters() if p.requires_grad]
    # Without gradients of the model's parameters, which some of the attacks would collect.
    passive = temporarily(learning, requires_grad=False)
    with undisturbed(model), passive, torch.random.fork_rng(cuda), torch.inference_mode(False):
        images, labels = images.clone(), labels.clone()
        attacked, accuracy = images.clone(), {"clean": _accuracy(forward, images, labels, batch)}
        for component in components:
            attack = _component(component, forward, images, eps=eps, norm=norm, seed=seed)
            standing = _right(forward, attacked, labels, batch)
            if standing.any():
                with torch.enable_grad():
                    found, _ = attack.run_standard_evaluation(images[standing], labels[standing], batch_size=batch)
                attacked[standing] = found
            accuracy[component] = _accuracy(forward, attacked, labels, batch)
            progress(component, accuracy[component])
        rounded = BALLS[norm].round(images, attacked, eps)
        accuracy["rounded"] = _accuracy(forward, rounded, labels, batch)
    return rounded, accuracy


@register("autoattack", own_steps=True, passes=100)
def attack_surrogate(
    model: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    seed = int(torch.randint(2**31, (), generator=randomness))
    return autoattack(model, images, labels, eps=threat["eps"], norm=threat["norm"], seed=seed)[0]


def _component(name: str, forward: Scores, images: Tensor, *, eps: float, norm: str, seed: int) -> Any:
    """Return one of the attacks, ready to run."""
    classes = forward(images[:1]).shape[1]
    if classes < LEAST_CLASSES:
        raise InvalidValueError(
            f"the model has {classes} classes, and AutoAttack's losses compare the {LEAST_CLASSES} best; expected "
            "at least as many. Use pgd"
        )
    attack = load_package().AutoAttack(
        forward, norm=NORMS[norm], eps=eps, version="standard", device=images.device, seed=seed
    )
    # The targeted attacks try nine other classes; with fewer than ten they would look past the last one.
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
    attack.attacks_to_run = [name]
    return attack


def load_package() -> Any:
    """Return the package pyautoattack, which then says nothing but errors."""
    try:
        import pyautoattack
    except ImportError as error:
        raise MissingPackageError("AutoAttack needs pyautoattack: pip install 'safer-tta[attacks]'") from error
    logging.getLogger(LOG).setLevel(logging.ERROR)
    return pyautoattack


@torch.no_grad()
def _right(forward: Scores, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    answers = [forward(part).argmax(dim=1) for part in torch.split(images, batch)]
    return torch.cat(answers) == labels


def _accuracy(forward: Scores, images: Tensor, labels: Tensor, batch: int) -> float:
    return 100 * float(_right(forward, images, labels, batch).float().mean())
