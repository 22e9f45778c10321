"""TSD: let the similarity to class prototypes teach the features.

Wang et al., "Feature alignment and uniformity for test time adaptation", CVPR 2023.
Objective: KL(softmax(similarity to the prototypes) ‖ prediction), summed over classes, averaged over the batch; the
prediction is not differentiated. Similarity is the cosine. All parameters but the head's (it gets no gradient) learn,
batch norms are in train mode. The answer is the model's own, made before the update. The paper's local-clustering term
has weight 0 in the experiments.

`released=True` is what the released experiments computed: probabilities enter the softmax as if they were logits, and
feature and prototype are scaled by their l1 norms.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Draw
from . import Cost, Method, Step, count, flag, option, positive, register
from ._frame import supports


@register("tsd")
class TSD(Method):
    updates = "all"
    cost = Cost(1, 1)
    lr: float = option(1e-4, positive)
    keep: int = option(100, count)
    released: bool = option(False, flag)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())
        self.state.memory.update(supports.from_head(self.classifier.head))

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        aligned = seen.aligned
        memory = supports.extended(self.state.memory, aligned, self.keep)
        prototypes = supports.prototypes(memory, self.classifier.num_classes)
        length = 1.0 if self.released else 2.0
        similarity = F.normalize(aligned.features, p=length, dim=1) @ F.normalize(prototypes, p=length, dim=1).T
        scores = aligned.probs if self.released else aligned.logits
        loss = F.kl_div(
            scores.detach().log_softmax(dim=1), similarity.log_softmax(dim=1), log_target=True, reduction="none"
        )
        answer = dataclasses.replace(seen.answer, features=aligned.features)  # the features it aligned
        return Step(seen, loss.sum(dim=1).mean(), answer, memory)

    def commit(self, images: Tensor, step: Step) -> None:
        self.state.memory.update(step.kept)
