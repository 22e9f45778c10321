"""TSD: let the similarity to class prototypes teach the features.

Wang et al., "Feature alignment and uniformity for test time adaptation", CVPR 2023.
Objective: KL(softmax(similarity to the prototypes) ‖ prediction), summed over classes, averaged over the batch; the
prediction is not differentiated. Similarity is the cosine. All parameters but the head's (it gets no gradient) learn,
batch norms are in train mode. The answer is the model's own, made before the update. The paper's local-clustering term
has weight 0 in the experiments.

`released=True` is what the released experiments computed: probabilities enter the softmax as if they were logits, and
feature and prototype are scaled by their l1 norms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..models.norm import use_train_mode
from ..predictors import Prediction, Predictor
from . import supports
from .base import Method
from .checks import count
from .cost import Cost
from .registry import register


@register("tsd")
class TSD(Method):
    updates = "all"
    cost = Cost(1, 1)

    def __init__(self, predictor: Predictor, *, lr: float = 1e-4, keep: int = 100, released: bool = False) -> None:
        count(keep=keep)
        self.keep, self.released = keep, released
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_train_mode(self.classifier.norms())
        self.state.memory.update(supports.from_head(self.classifier.head))

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor]:
        prediction = self.predictor.lesson(images, draw, by_features=True)
        memory = supports.extended(self.state.memory, prediction, self.keep)
        prototypes = supports.prototypes(memory, self.classifier.num_classes)
        length = 1.0 if self.released else 2.0
        similarity = F.normalize(prediction.features, p=length, dim=1) @ F.normalize(prototypes, p=length, dim=1).T
        scores = prediction.probs if self.released else prediction.logits
        loss = F.kl_div(
            scores.detach().log_softmax(dim=1), similarity.log_softmax(dim=1), log_target=True, reduction="none"
        )
        return dataclasses.replace(prediction, kept=memory), loss.sum(dim=1).mean()

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        self.state.memory.update(prediction.kept)
