"""Resubmission: the attacker sends an image again and again, until a random defence happens to misread it."""

import torch
from torch import Generator, Tensor

from .._internal.checks import count
from .._internal.seeds import draw_seed
from ..errors import InvalidTypeError
from ..predictors import Predictor
from .pgd import check_labels


@torch.no_grad()
def resubmit(
    predictor: Predictor, images: Tensor, labels: Tensor, *, times: int = 10, generator: Generator | None = None
) -> Tensor:
    """Ask a predictor as it stands now about a batch several times, and return which images it got right every time.

    Args:
        predictor: What is asked, such as `Safer(model)` or `adapted.predictor`. It is not moved.
        images: (B,3,H,W), floats in [0,1] or uint8, attacked or not.
        labels: The true classes (B,).
        times: How often the batch is sent; the views are drawn afresh each time.
        generator: Decides the draws; it is on the CPU.

    Returns:
        (B,) of bool.
    """
    count(times=times)
    if not isinstance(predictor, Predictor):
        raise InvalidTypeError(
            f"predictor is {type(predictor).__name__}; expected a Predictor, such as Safer(model) or adapted.predictor"
        )
    check_labels(labels, images)
    asked = predictor.fork(seed=draw_seed(generator))
    right = torch.ones_like(labels, dtype=torch.bool)
    for _ in range(times):
        answers = asked(images, asked.draw(images), track=False).labels
        right &= answers.to(labels.device) == labels
    return right
