"""SAR: learn only from reliable images, towards flat minima, and start over when the model collapses.

Niu et al., "Towards stable test-time adaptation in dynamic wild world", ICLR 2023.
Images with H(p) < 0.4 ln K; a sharpness-aware step (radius 0.05) on their entropy, where the second pass drops those
that are no longer certain at the perturbed weights; SGD with momentum. If the running mean of the second loss falls
below 0.2, the model has collapsed and is restored.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..models.norm import use_batch_statistics
from ..predictors import Prediction, Predictor
from .base import Closure, Method, checked_lr
from .checks import not_negative, positive
from .cost import Cost
from .losses import entropy
from .registry import register
from .sharpness import sharpness_aware_step


@register("sar")
class SAR(Method):
    updates = "norm"
    cost = Cost(2, 2)

    def __init__(
        self,
        predictor: Predictor,
        *,
        lr: float = 2.5e-4,
        margin: float = 0.4,
        radius: float = 0.05,
        recovery: float = 0.2,
    ) -> None:
        positive(margin=margin, radius=radius)
        not_negative(recovery=recovery)
        self.margin = margin * math.log(max(2, predictor.classifier.num_classes))
        self.radius, self.recovery = radius, recovery
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        self.state.memory["mean_loss"] = torch.tensor(-1.0)  # below 0: none yet
        self.second_loss: Tensor | None = None

    def build_optimizer(self, parameters: list[nn.Parameter], lr: float | None) -> Optimizer:
        return SGD(parameters, lr=checked_lr(lr), momentum=0.9)

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor | None]:
        prediction = self.predictor.lesson(images, draw)
        h = entropy(prediction.logits)
        certain = h.detach() < self.margin
        self.second_loss = None
        if not bool(certain.any()):
            return prediction, None
        return dataclasses.replace(prediction, kept={"certain": certain}), h[certain].mean()

    def again(self, images: Tensor, draw: Any, prediction: Prediction) -> Tensor | None:
        h = entropy(self.predictor.lesson(images, draw).logits)[prediction.kept["certain"]]
        still = h.detach() < self.margin
        if not bool(still.any()):
            return None
        loss = h[still].mean()
        self.second_loss = loss.detach()
        return loss

    def optimise(self, closure: Closure) -> None:
        assert self.optimizer is not None
        sharpness_aware_step(self.optimizer, closure, self.radius)

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        if self.second_loss is None:
            return
        mean, loss = self.state.memory["mean_loss"], self.second_loss.cpu().float()
        mean = loss if float(mean) < 0 else 0.9 * mean + 0.1 * loss
        self.state.memory["mean_loss"] = mean
        if float(mean) < self.recovery:
            self.restore()
