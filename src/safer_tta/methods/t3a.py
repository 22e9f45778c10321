"""T3A: replace the head by prototypes of the features the model was surest about. Nothing is trained.

Iwasawa and Matsuo, "Test-time classifier adjustment module for model-agnostic domain generalization", NeurIPS 2021.
Prediction: z · (unit-norm prototypes), with the batch at hand among the supports. The model is in eval mode.
"""

import torch.nn.functional as F
from torch import Tensor

from ..predictors import Draw
from . import Cost, Method, Step, count, option, register
from ._frame import supports


@register("t3a")
class T3A(Method):
    updates = "none"
    cost = Cost(1, 0)
    by_predictor = False
    keep: int = option(100, count)

    def prepare(self) -> None:
        self.state.memory.update(supports.from_head(self.classifier.head))

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        memory = supports.extended(self.state.memory, seen.lesson, self.keep)
        prototypes = F.normalize(supports.prototypes(memory, self.classifier.num_classes), dim=1)
        answer = seen.lesson.with_logits(seen.lesson.features @ prototypes.T)
        return Step(seen, None, answer, memory)

    def commit(self, images: Tensor, step: Step) -> None:
        self.state.memory.update(step.kept)
