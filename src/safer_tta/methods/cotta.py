"""CoTTA: learn from an averaged teacher, and now and then a weight goes back to the source.

Wang et al., "Continual test-time domain adaptation", CVPR 2022.
Objective: cross-entropy of the student to the teacher. The teacher follows (0.999); where the source model is unsure of
the batch (mean confidence below 0.92) its answers are averaged over 32 augmented versions. After every step each weight
is put back to its source value with probability 0.01. All parameters learn, with batch statistics. The answer is the
teacher's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.norm import use_batch_statistics
from ..predictors import Prediction, Predictor
from ..seeds import drawn
from .base import Method
from .checks import count, not_negative, share
from .cost import Cost
from .losses import cross_entropy
from .own_views import Seeded, seeded, strong
from .registry import register
from .teacher import follow, make_teacher


@register("cotta")
class CoTTA(Method):
    updates = "all"
    cost = Cost(19, 1, "3 to 34 forward, 1 backward")
    by_predictor = False

    def __init__(
        self,
        predictor: Predictor,
        *,
        lr: float = 1e-3,
        keep: float = 0.999,
        restore_rate: float = 0.01,
        threshold: float = 0.92,
        versions: int = 32,
    ) -> None:
        share(keep=keep, restore_rate=restore_rate)
        not_negative(threshold=threshold)
        count(versions=versions)
        self.keep, self.restore_rate, self.threshold, self.versions = keep, restore_rate, threshold, versions
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        self.teacher = make_teacher(self.predictor, self.state)
        source = copy.deepcopy(self.classifier).requires_grad_(False)
        self.state.constants["source"] = source
        self.source = self.teacher.over(source)

    def draw(self, images: Tensor) -> Seeded:
        return seeded(self.predictor, images)

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor]:
        student = self.predictor.lesson(images, draw.draw)
        with torch.no_grad():
            answer = self._teach(images, draw)
        return answer, cross_entropy(answer.taught().probs, student.logits).mean()

    def _teach(self, images: Tensor, draw: Seeded) -> Prediction:
        plain = self.teacher(images, draw.draw)
        if float(self.source.lesson(images, draw.draw).probs.amax(dim=1).mean()) >= self.threshold:
            return plain
        generator = draw.generator()
        versions = [self.teacher(strong(images, generator), draw.draw) for _ in range(self.versions)]
        lesson = None if plain.lesson is None else _mean_logits([v.taught() for v in versions]).softmax(dim=1)
        # The views that the report could show are those of the plain images, which the answer is no longer made of.
        report = dataclasses.replace(plain.report, view_probs=None)
        return dataclasses.replace(plain.saying(_mean_logits(versions), lesson=lesson), report=report)

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        follow(self.teacher, self.predictor, self.keep)
        seed = drawn(self.predictor.generator)
        generator = torch.Generator(self.classifier.device).manual_seed(seed)
        pairs = zip(self.classifier.parameters(), self.source.classifier.parameters(), strict=True)
        for parameter, source in pairs:
            chance = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(torch.where(chance < self.restore_rate, source, parameter))


def _mean_logits(versions: Sequence[Prediction]) -> Tensor:
    return torch.stack([version.logits for version in versions]).mean(dim=0)
