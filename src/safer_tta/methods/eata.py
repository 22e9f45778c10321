"""EATA: learn from certain images that say something new, and do not forget the source.

Niu et al., "Efficient test-time model adaptation without forgetting", ICML 2022.
Kept are images with H(p) < 0.4 ln K whose prediction is unlike the running mean of what was kept (|cos| < 0.05).
Objective: mean over the kept of exp(0.4 ln K - H) · H, plus, once `fit_source` has seen source images, the Fisher
penalty 2000 · Σ F (θ - θ_source)². Scale and shift of the norms learn, with batch statistics.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._internal.locking import exclusive
from ..errors import InvalidValueError
from ..models.norm import use_batch_statistics
from ..predictors import Draw
from . import Cost, Method, Step, not_negative, option, positive, register, share
from ._frame.losses import largest_entropy, softmax_entropy


@register("eata")
class EATA(Method):
    updates = "norm"
    cost = Cost(1, 1)
    lr: float = option(2.5e-4, positive)
    margin: float = option(0.4, positive)
    redundancy: float = option(0.05, share)
    momentum: float = option(0.9, share)
    fisher: float = option(2000.0, not_negative)

    @property
    def most_entropy(self) -> float:
        """The entropy below which an image is certain."""
        return self.margin * largest_entropy(self.classifier.num_classes)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        head = self.classifier.head.weight
        # The mean of the kept predictions; zeros: none yet.
        self.state.memory["mean"] = head.new_zeros(self.classifier.num_classes)
        for index, parameter in enumerate(self.classifier.trainable_parameters(self.updates)):
            self.state.memory[f"fisher{index}"] = torch.zeros_like(parameter)
            self.state.memory[f"source{index}"] = parameter.detach().clone()

    @exclusive
    def fit_source(self, batches: Iterable[Any]) -> None:
        """Estimate from source images which parameters matter, before the stream starts."""
        self.reset()
        parameters = self.classifier.trainable_parameters(self.updates)
        total = [torch.zeros_like(p) for p in parameters]
        count = 0
        before = self.state.hold()
        try:
            for batch in batches:
                images = batch[0] if isinstance(batch, (tuple, list)) else batch
                with torch.enable_grad():
                    logits = self.predictor.look(images, self.predictor.draw(images), track=False).lesson.logits
                    loss = F.cross_entropy(logits, logits.argmax(dim=1))
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # None: of an auxiliary head
                total = [t if g is None else t + g.square() for t, g in zip(total, gradients, strict=True)]
                count += 1
        finally:
            self.state.put_back(before)  # the stream is drawn as if this had not happened
        if not count:
            raise InvalidValueError("fit_source received no batch; expected source images")
        for index, value in enumerate(total):
            self.state.memory[f"fisher{index}"] = value / count
        self.state.initial = self.state.snapshot()

    @exclusive
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        """Continue from a state. What `fit_source` estimated comes with it, and stays after a reset."""
        super().load_state_dict(snapshot)
        initial = self.state.initial
        initial |= {name: snapshot[name].clone() for name in initial if name.startswith("memory.fisher")}

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        logits = seen.lesson.logits
        h, probs = softmax_entropy(logits), logits.detach().softmax(dim=1)
        chosen = h.detach() < self.most_entropy
        mean = self.state.memory["mean"]
        if bool(mean.any()):
            chosen = chosen & (F.cosine_similarity(mean[None], probs, dim=1).abs() < self.redundancy)
        if not bool(chosen.any()):
            return Step(seen, None)
        weight = torch.exp(self.most_entropy - h.detach())
        loss = (weight * h)[chosen].mean() + self._penalty()
        return Step(seen, loss, kept={"probs": probs[chosen]})

    def commit(self, images: Tensor, step: Step) -> None:
        if "probs" in step.kept:
            mean, new = self.state.memory["mean"], step.kept["probs"].mean(dim=0)
            self.state.memory["mean"] = self.momentum * mean + (1 - self.momentum) * new if bool(mean.any()) else new

    def _penalty(self) -> Tensor:
        memory = self.state.memory
        parameters = self.classifier.trainable_parameters(self.updates)
        terms = [(memory[f"fisher{i}"] * (p - memory[f"source{i}"]).square()).sum() for i, p in enumerate(parameters)]
        return self.fisher * torch.stack(terms).sum()
