"""SAR: learn only from reliable images, towards flat minima, and start over when the model collapses.

Niu et al., "Towards stable test-time adaptation in dynamic wild world", ICLR 2023.
Images with H(p) < 0.4 ln K; a sharpness-aware step (radius 0.05) on their entropy, where the second pass drops those
that are no longer certain at the perturbed weights; SGD with momentum. If the running mean of the second loss falls
below 0.2, the model has collapsed and is restored.
"""

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..models.norm import use_batch_statistics
from ..predictors import Draw
from . import Closure, Cost, Method, Step, not_negative, option, positive, register
from ._frame.losses import largest_entropy, softmax_entropy
from ._frame.sharpness import sharpness_aware_step


@register("sar")
class SAR(Method):
    updates = "norm"
    cost = Cost(2, 2)
    lr: float = option(2.5e-4, positive)
    margin: float = option(0.4, positive)
    radius: float = option(0.05, positive)
    recovery: float = option(0.2, not_negative)

    @property
    def most_entropy(self) -> float:
        """The entropy below which an image is certain."""
        return self.margin * largest_entropy(self.classifier.num_classes)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        self.state.memory["mean_loss"] = torch.tensor(-1.0)  # below 0: none yet
        self.second_loss: Tensor | None = None

    def build_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.lr, momentum=0.9)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        h = softmax_entropy(seen.lesson.logits)
        certain = h.detach() < self.most_entropy
        self.second_loss = None
        if not bool(certain.any()):
            return Step(seen, None)
        return Step(seen, h[certain].mean(), kept={"certain": certain})

    def again(self, images: Tensor, draw: Draw, step: Step) -> Tensor | None:
        h = softmax_entropy(self.predictor.look(images, draw).lesson.logits)[step.kept["certain"]]
        still = h.detach() < self.most_entropy
        if not bool(still.any()):
            return None
        loss = h[still].mean()
        self.second_loss = loss.detach()
        return loss

    def optimise(self, closure: Closure) -> None:
        assert self.optimizer is not None
        sharpness_aware_step(self.optimizer, closure, self.radius)

    def commit(self, images: Tensor, step: Step) -> None:
        if self.second_loss is None:
            return
        mean, loss = self.state.memory["mean_loss"], self.second_loss.cpu().float()
        mean = loss if float(mean) < 0 else 0.9 * mean + 0.1 * loss
        self.state.memory["mean_loss"] = mean
        if float(mean) < self.recovery:
            self.restore()
