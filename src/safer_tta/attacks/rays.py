"""RayS (Chen and Gu, KDD 2020): a search that asks for labels only, under an l∞ budget.

It looks for the direction of signs in which the image is misread soonest. A trial turns the signs of one block of the
best direction so far; blocks halve as the search goes on. The first query of a trial is at the best radius so far. If
the image is read right there, the trial ends. Otherwise its own radius is found by bisection, beginning at the budget.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from ..models import Classifier
from ..predictors import Predictor
from .pgd import BALLS
from .queries import Found, ask, prepare
from .registry import register

CLEAN, PROBE, BUDGET, BISECT = range(4)  # an image is asked about as it is; at the best radius; at the budget; between
TOLERANCE = 1e-3  # of a radius


def rays(
    target: Callable[[Tensor], Any],
    images: Tensor,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    queries: int = 1000,
    average: int = 1,
    generator: Generator | None = None,
) -> Found:
    """Attack a batch by asking for labels. The first query asks about the images as they are.

    An image that is misread only beyond the budget is returned at the edge of the budget, in its best direction.

    Args:
        target: A Predictor as it stands now, a method (every query moves it unless it is frozen), a model, or any
            function from images to class scores, of which only the highest is looked at.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        eps: The budget in pixel values of [0,1], in l∞.
        queries: How many answers to each image the attacker may ask for.
        average: How many answers to the same images decide by majority; each of them is a query.
        generator: Decides what a predictor draws for these queries; it is on the CPU.

    Returns:
        The images, which of them are misread, and how many queries each took.
    """
    images, labels = prepare(images, labels, eps=eps, queries=queries, average=average)
    search = _Rays(images, labels, eps)
    return ask(target, search, size=len(images), queries=queries, average=average, generator=generator)


@register("rays", live=True, own_steps=True, passes=1, norms=("linf",), options={"queries": 1000, "average": 1})
def attack_labels(
    model: Predictor | Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    told = {name: threat[name] for name in ("eps", "queries", "average")}
    return rays(model, images, labels, generator=randomness, **told).images


class _Rays:
    """The search of every image, each at a stage of its own."""

    def __init__(self, images: Tensor, labels: Tensor, eps: float) -> None:
        self.images, self.labels, self.eps = images, labels, eps
        self.stage = torch.full_like(labels, CLEAN)
        self.number = torch.zeros_like(labels)  # of the trial; the first turns nothing
        self.direction = self.trial = torch.ones_like(images).flatten(1)
        self.radius = torch.ones_like(images[:, 0, 0, 0])
        self.low = self.high = self.radius  # between which the radius of the trial is bisected

    @property
    def best(self) -> Tensor:
        moved = torch.where((self.stage == BUDGET)[:, None], self.trial, self.direction)
        moved = torch.where((self.stage == CLEAN)[:, None], 0, moved)
        return BALLS["linf"].round(self.images, self._moved(self.eps * moved), self.eps)

    def propose(self) -> Tensor:
        reach = torch.where(self.stage == PROBE, self.radius, (self.low + self.high) / 2)
        further = (self.stage == PROBE) | (self.stage == BISECT)
        return torch.where(further[:, None, None, None], self._moved(reach[:, None] * self.trial), self.best)

    def learn(self, answers: list[Tensor]) -> Tensor:
        wrong = torch.stack([answer.argmax(dim=1) != self.labels for answer in answers])
        misread = 2 * wrong.sum(dim=0) > len(answers)
        held = misread & ((self.stage == CLEAN) | (self.stage == BUDGET))
        closed = self._bisect(misread) & ~held
        self.radius = torch.where(closed, self.high, self.radius)
        self.direction = torch.where(closed[:, None], self.trial, self.direction)
        ended = closed | ((self.stage == PROBE) & ~misread)
        self.number = torch.where(ended, self.number + 1, self.number)
        self.trial = torch.where(ended[:, None], self._turned(), self.trial)
        onward = torch.where(held | (self.stage == BISECT), self.stage, self.stage + 1)
        self.stage = torch.where(ended, PROBE, onward)
        return held

    def _bisect(self, misread: Tensor) -> Tensor:
        """Narrow the radii of the trials; return which of them are known."""
        first, between = self.stage == BUDGET, self.stage == BISECT
        middle = (self.low + self.high) / 2
        low, high = torch.where(misread, self.low, middle), torch.where(misread, middle, self.high)
        self.low = torch.where(first, self.eps, torch.where(between, low, self.low))
        self.high = torch.where(first, self.radius, torch.where(between, high, self.high))
        return (first | between) & (self.high - self.low < TOLERANCE)

    def _turned(self) -> Tensor:
        """Return directions with the signs of a block turned: block 1 is all, 2 and 3 are halves, 4 to 7 quarters."""
        size = self.direction.shape[1]
        number = (self.number - 1) % (2 ** size.bit_length() - 1) + 1  # after the smallest blocks, all over again
        blocks = 2 ** number.double().log2().floor().long()
        place = torch.arange(size, device=number.device) * blocks[:, None] // size
        return torch.where(place == (number - blocks)[:, None], -self.direction, self.direction)

    def _moved(self, change: Tensor) -> Tensor:
        return (self.images + change.view_as(self.images)).clamp(0, 1)
