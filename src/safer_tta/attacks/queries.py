"""What attacks by queries share: they see answers, and neither gradients nor weights.

Every query shows the whole batch, because answers may depend on all of it. An image that is misread already stays in it
as it is, and its newest answer counts: where answers are random, the search for it resumes if it is read right again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from .._internal.checks import count
from .._internal.seeds import draw_seed
from ..errors import InvalidValueError
from ..predictors import Prediction, Predictor, check_images
from .pgd import check_labels, check_threat, scores, undisturbed


class Found(NamedTuple):
    """What an attack by queries found.

    Attributes:
        images: The images (B,3,H,W) on 8-bit values, within the budget.
        misread: Whether the last answer to each of them was wrong, (B,) of bool.
        queries: How many answers each image took until it stayed misread (B,); all of them if it was not.
    """

    images: Tensor
    misread: Tensor
    queries: Tensor


class Search(Protocol):
    """A search for misread images, which asks about a batch at a time."""

    @property
    def best(self) -> Tensor:
        """The images that the search ends with if it ends now."""
        ...

    def propose(self) -> Tensor:
        """Return the batch to ask about next."""
        ...

    def learn(self, answers: list[Tensor]) -> Tensor:
        """Learn from the class scores (B,K) of each answer; return which of `best` are misread."""
        ...


def ask(
    target: Callable[[Tensor], Any],
    search: Search,
    *,
    size: int,
    queries: int,
    average: int,
    generator: Generator | None,
) -> Found:
    """Ask about a batch of this size, `average` times each, until all is misread or the queries are spent."""
    answer = _answering(target, generator)
    misread, used = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    with undisturbed(target), torch.inference_mode(False), torch.no_grad():
        for asked in range(average, queries + 1, average):
            shown = search.propose()
            now = search.learn([answer(shown).float().to(shown.device) for _ in range(average)]).cpu()
            used = torch.where(misread & now, used, asked)
            misread = now
            if bool(misread.all()):
                break
    return Found(search.best, misread, used)


def prepare(images: Tensor, labels: Tensor, *, eps: float, queries: int, average: int) -> tuple[Tensor, Tensor]:
    """Check what an attack by queries is told; return images in [0,1], and labels beside them."""
    check_threat(eps=eps, step=eps, steps=1, norm="linf")
    count(queries=queries, average=average)
    if average > queries:
        raise InvalidValueError(
            f"average is {average} and queries is {queries}; expected at most {queries} answers to average, since "
            "each of them is a query"
        )
    check_images(images, channels=())
    check_labels(labels, images)
    with torch.inference_mode(False):  # tensors that methods may learn from
        images = images / 255 if images.dtype == torch.uint8 else images.detach().clone()
        return images, labels.to(images.device, copy=True)


def _answering(target: Callable[[Tensor], Any], generator: Generator | None) -> Callable[[Tensor], Tensor]:
    """Return a function from images to class scores. A predictor draws afresh for every query and does not move."""
    if isinstance(target, nn.Module):
        return functools.partial(scores, target)
    if not isinstance(target, Predictor):
        return functools.partial(scores, lambda images: target(images))  # a method answers, and adapts
    known = target.fork(seed=draw_seed(generator), validate=False)  # what is asked is in range by construction

    def predict(images: Tensor) -> Prediction:
        return known(images, known.draw(images), track=False)

    return functools.partial(scores, predict)
