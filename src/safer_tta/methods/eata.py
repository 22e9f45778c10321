"""EATA: learn from certain images that say something new, and do not forget the source.

Niu et al., "Efficient test-time model adaptation without forgetting", ICML 2022.
Kept are images with H(p) < 0.4 ln K whose prediction is unlike the running mean of what was kept (|cos| < 0.05).
Objective: mean over the kept of exp(0.4 ln K - H) · H, plus, once `fit_source` has seen source images, the Fisher
penalty 2000 · Σ F (θ - θ_source)². Scale and shift of the norms learn, with batch statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.norm import use_batch_statistics
from ..predictors import Prediction, Predictor
from .base import Method
from .checks import not_negative, positive, share
from .cost import Cost
from .losses import entropy
from .registry import register
from .stateful import alone


@register("eata")
class EATA(Method):
    updates = "norm"
    cost = Cost(1, 1)

    def __init__(
        self,
        predictor: Predictor,
        *,
        lr: float = 2.5e-4,
        margin: float = 0.4,
        redundancy: float = 0.05,
        momentum: float = 0.9,
        fisher: float = 2000.0,
    ) -> None:
        positive(margin=margin)
        share(momentum=momentum, redundancy=redundancy)
        not_negative(fisher=fisher)
        self.margin = margin * math.log(max(2, predictor.classifier.num_classes))
        self.redundancy, self.momentum, self.fisher = redundancy, momentum, fisher
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        head = self.classifier.head.weight
        self.state.memory["mean"] = head.new_zeros(self.classifier.num_classes)  # of the kept predictions; 0 = none yet
        for index, parameter in enumerate(self.classifier.learning(self.updates)):
            self.state.memory[f"fisher{index}"] = torch.zeros_like(parameter)
            self.state.memory[f"source{index}"] = parameter.detach().clone()

    @alone
    def fit_source(self, batches: Iterable[Any]) -> None:
        """Estimate from source images which parameters matter, before the stream starts."""
        self.reset()
        parameters = self.classifier.learning(self.updates)
        total = [torch.zeros_like(p) for p in parameters]
        count = 0
        before = self.state.hold()
        try:
            for batch in batches:
                images = batch[0] if isinstance(batch, (tuple, list)) else batch
                with torch.enable_grad():
                    logits = self.predictor.lesson(images, self.predictor.draw(images), track=False).logits
                    loss = F.cross_entropy(logits, logits.argmax(dim=1))
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # of an auxiliary head, say
                total = [t if g is None else t + g.square() for t, g in zip(total, gradients, strict=True)]
                count += 1
        finally:
            self.state.put_back(before)  # the stream is drawn as without it
        if not count:
            raise ValueError("fit_source received no batch; expected source images")
        for index, value in enumerate(total):
            self.state.memory[f"fisher{index}"] = value / count
        self._initial = self.state.snapshot()

    @alone
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        """What `fit_source` found out comes with a state, and stays when the method goes back to its start."""
        super().load_state_dict(snapshot)
        self._initial |= {name: snapshot[name].clone() for name in self._initial if name.startswith("memory.fisher")}

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor | None]:
        prediction = self.predictor.lesson(images, draw)
        h = entropy(prediction.logits)
        chosen = self._chosen(h.detach(), prediction.logits.detach().softmax(dim=1))
        if not bool(chosen.any()):
            return prediction, None
        weight = torch.exp(self.margin - h.detach())
        loss = (weight * h)[chosen].mean() + self._penalty()
        kept = {"probs": prediction.logits.detach().softmax(dim=1)[chosen]}
        return dataclasses.replace(prediction, kept=kept), loss

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        if "probs" in prediction.kept:
            mean, new = self.state.memory["mean"], prediction.kept["probs"].mean(dim=0)
            self.state.memory["mean"] = self.momentum * mean + (1 - self.momentum) * new if bool(mean.any()) else new

    def _chosen(self, h: Tensor, probs: Tensor) -> Tensor:
        chosen = h < self.margin
        mean = self.state.memory["mean"]
        if bool(mean.any()):
            chosen = chosen & (F.cosine_similarity(mean[None], probs, dim=1).abs() < self.redundancy)
        return chosen

    def _penalty(self) -> Tensor:
        parameters = self.classifier.learning(self.updates)
        terms = [
            (self.state.memory[f"fisher{i}"] * (p - self.state.memory[f"source{i}"]).square()).sum()
            for i, p in enumerate(parameters)
        ]
        return self.fisher * torch.stack(terms).sum()
