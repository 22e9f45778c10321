"""Square attack (Andriushchenko et al., ECCV 2020): a random search that asks for class scores, under an l∞ budget.

It starts from vertical stripes. Every query then moves one square of the image, at a random place, by the whole budget,
up or down in each channel. A move that lowers the lead of the true class is kept. Squares shrink as the search goes on.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..models import Classifier
from ..predictors import Predictor
from .patch import random_squares
from .pgd import BALLS
from .queries import Found, ask, prepare
from .registry import register

AREA = 0.8  # of the image that the first square covers, as in AutoAttack
HALVED = (0.001, 0.005, 0.02, 0.1, 0.2, 0.4, 0.6, 0.8)  # shares of the queries after which it covers half as much


def square(
    target: Callable[[Tensor], Any],
    images: Tensor,
    labels: Tensor,
    *,
    queries: int = 1000,
    average: int = 1,
    eps: float = 8 / 255,
    generator: Generator | None = None,
) -> Found:
    """Attack a batch by asking for class scores. The first query asks about the images as they are.

    Args:
        target: A Predictor as it stands now, a method (every query moves it unless it is frozen), a model, or any
            function from images to class scores.
        images: (B,3,H,W), floats in [0,1] or uint8.
        labels: The true classes (B,).
        queries: How many answers to each image the attacker may ask for.
        average: How many answers to the same images are averaged; each of them is a query.
        eps: The budget in pixel values of [0,1], in l∞.
        generator: The attacker's own, on the CPU.

    Returns:
        The images, which of them are misread, and how many queries each took.
    """
    images, labels = prepare(images, labels, eps=eps, queries=queries, average=average)
    search = _Squares(images, labels, eps, queries // average, generator)
    return ask(target, search, size=len(images), queries=queries, average=average, generator=generator)


@register("square", live=True, own_steps=True, passes=1, norms=("linf",), options={"queries": 1000, "average": 1})
def attack_scores(
    model: Predictor | Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
) -> Tensor:
    told = {name: threat[name] for name in ("eps", "queries", "average")}
    return square(model, images, labels, generator=randomness, **told).images


class _Squares:
    """The search of every image. Perturbed pixels are at the edge of the budget, so their signs say all."""

    def __init__(self, images: Tensor, labels: Tensor, eps: float, rounds: int, generator: Generator | None) -> None:
        self.images, self.labels, self.eps = images, labels, eps
        self.rounds, self.done, self.generator = rounds, 0, generator
        self.best = self.tried = BALLS["linf"].round(images, images, eps)
        self.signs = self.tried_signs = self._random_signs(1, images.shape[3]).expand_as(images)
        self.lead = torch.full([len(images)], math.inf, device=images.device)

    def propose(self) -> Tensor:
        if self.done > 1:
            height, width = self.images.shape[2:]
            side = max(1, min(round(math.sqrt(self._area() * height * width)), height, width))
            inside = random_squares(self.images, side, self.generator)
            self.tried_signs = torch.where(inside, self._random_signs(1, 1), self.signs)
        if self.done:
            moved = BALLS["linf"].round(self.images, self.images + self.eps * self.tried_signs, self.eps)
            self.tried = torch.where(_each(self.lead < 0), self.best, moved)
        return self.tried

    def learn(self, answers: list[Tensor]) -> Tensor:
        # The start counts whatever it does, and so does the newest answer to an image that was misread.
        better = (self._lead(answers) < self.lead) | (self.lead < 0) | (self.done == 1)
        self.best = torch.where(_each(better), self.tried, self.best)
        self.signs = torch.where(_each(better & (self.lead >= 0)), self.tried_signs, self.signs)
        self.lead = torch.where(better, self._lead(answers), self.lead)
        self.done += 1
        return self.lead < 0

    def _lead(self, answers: list[Tensor]) -> Tensor:
        """Return by how much the true class leads the best other one in the logarithm of the mean probabilities."""
        mean = torch.stack([F.log_softmax(answer, dim=1) for answer in answers]).logsumexp(dim=0)
        own = self.labels[:, None]
        return (mean.gather(1, own) - mean.scatter(1, own, -math.inf).amax(dim=1, keepdim=True))[:, 0]

    def _area(self) -> float:
        spent = self.done / self.rounds
        return AREA * 0.5 ** len([share for share in HALVED if spent > share])

    def _random_signs(self, height: int, width: int) -> Tensor:
        shape = (*self.images.shape[:2], height, width)
        return (2 * torch.randint(2, shape, generator=self.generator) - 1).to(self.images)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]
