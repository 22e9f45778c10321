"""CoTTA: learn from an averaged teacher, and now and then a weight goes back to the source.

Wang et al., "Continual test-time domain adaptation", CVPR 2022.
Objective: cross-entropy of the student to the teacher. The teacher follows (0.999); where the source model is unsure of
the batch (mean confidence below 0.92) its answers are averaged over 32 augmented versions. After every step each weight
is put back to its source value with probability 0.01. All parameters learn, with batch statistics. The answer is the
teacher's.
"""

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .._internal.seeds import draw_seed
from ..models.norm import use_batch_statistics
from ..predictors import Draw, Outlook, Prediction
from . import Cost, Method, Step, count, not_negative, option, positive, register, share
from ._frame.augmentations import strong
from ._frame.losses import cross_entropy
from ._frame.teacher import follow, make_teacher


@register("cotta")
class CoTTA(Method):
    updates = "all"
    cost = Cost(19, 1, "3 to 34 forward, 1 backward")
    by_predictor = False
    own_views = True
    lr: float = option(1e-3, positive)
    keep: float = option(0.999, share)
    restore_rate: float = option(0.01, share)
    threshold: float = option(0.92, not_negative)
    versions: int = option(32, count)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        self.teacher = make_teacher(self.predictor, self.state)
        source = copy.deepcopy(self.classifier).requires_grad_(False)
        self.state.constants["source"] = source
        self.source = self.teacher.fork(source)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        student = self.predictor.look(images, draw).lesson
        with torch.no_grad():
            taught = self._teach(images, draw)
        return Step(taught, cross_entropy(taught.lesson.probs, student.logits).mean())

    def _teach(self, images: Tensor, draw: Draw) -> Outlook:
        plain = self.teacher.look(images, draw)
        if float(self.source.look(images, draw).lesson.probs.amax(dim=1).mean()) >= self.threshold:
            return plain
        generator = draw.generator()
        versions = [self.teacher.look(strong(images, generator), draw) for _ in range(self.versions)]
        answer = _averaged(plain.answer, [version.answer for version in versions])
        # The report's views are those of the plain images, of which the answer is no longer made.
        answer = dataclasses.replace(answer, report=dataclasses.replace(answer.report, view_probs=None))
        lesson = answer
        if plain.lesson is not plain.answer:
            lesson = _averaged(plain.lesson, [version.lesson for version in versions])
        return Outlook(answer, lesson, lesson, plain.memory)

    def commit(self, images: Tensor, step: Step) -> None:
        follow(self.teacher, self.predictor, self.keep)
        seed = draw_seed(self.predictor.generator)
        generator = torch.Generator(self.classifier.device).manual_seed(seed)
        pairs = zip(self.classifier.parameters(), self.source.classifier.parameters(), strict=True)
        for parameter, source in pairs:
            chance = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(torch.where(chance < self.restore_rate, source, parameter))


def _averaged(plain: Prediction, versions: Sequence[Prediction]) -> Prediction:
    """The prediction with the mean logits of several versions."""
    return plain.with_logits(torch.stack([version.logits for version in versions]).mean(dim=0))
