"""NOTE: normalise each image by itself unless it is ordinary, and learn from a memory with all classes in it.

Gong et al., "NOTE: Robust continual test-time adaptation against temporal correlation", NeurIPS 2022.
Instance-aware batch norm: an image's own mean and variance count only as far as they leave the band (4 standard errors)
in which the running ones would put them. A prediction-balanced reservoir of 64 images is filled from the stream; every
64 images one step on its entropy, scale and shift of the norms, running statistics following with momentum 0.01.

The paper trains with this normalisation from the start; here it replaces batch norm at test time.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.norm import successor, use_train_mode
from . import Cost, Step, count, option, positive, register, share
from ._frame.image_memory import ImageMemory, RememberingMethod


class InstanceAwareBatchNorm(nn.BatchNorm2d):
    """Batch norm that follows an image's own statistics as far as they are out of the ordinary."""

    band = 4.0
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def get_extra_state(self) -> Tensor:
        """Return the band, so that the weights of this layer do not pass for those of an ordinary batch norm."""
        return torch.tensor(self.band)

    def set_extra_state(self, state: Tensor) -> None: ...

    def forward(self, given: Tensor) -> Tensor:
        x = given.to(torch.promote_types(given.dtype, torch.float32))
        pixels = x.shape[2] * x.shape[3]
        if self.training:
            usual_var, usual_mean = torch.var_mean(x, dim=(0, 2, 3), keepdim=True)
            if self.track_running_stats:
                self.running_mean.lerp_(usual_mean.detach().flatten(), self.momentum)
                self.running_var.lerp_(usual_var.detach().flatten(), self.momentum)
        else:
            usual_mean, usual_var = (s.view(1, -1, 1, 1) for s in (self.running_mean, self.running_var))
        mean, var = usual_mean, usual_var
        if pixels > 1:
            own_var, own_mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
            mean = mean + _beyond(own_mean - mean, self.band * torch.sqrt((usual_var + self.eps) / pixels))
            spread = (usual_var + self.eps) * math.sqrt(2 / (pixels - 1))
            var = F.relu(var + _beyond(own_var - usual_var, self.band * spread))
        normalised = (x - mean) * torch.rsqrt(var + self.eps)
        if self.affine:
            normalised = normalised * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        return normalised.to(given.dtype)


def _beyond(difference: Tensor, band: Tensor) -> Tensor:
    """The part of a difference that lies outside ±band."""
    return difference.sign() * F.relu(difference.abs() - band)


@register("note")
class NOTE(RememberingMethod):
    updates = "norm"
    own_norms = True
    cost = Cost(2, 1, "1 + 1 of the memory forward, 1 backward")
    lr: float = option(1e-4, positive)
    capacity: int = option(64, count)
    every: int = option(64, count)
    momentum: float = option(0.01, share)

    def prepare(self) -> None:
        self.classifier.replace_norms(lambda norm: successor(InstanceAwareBatchNorm, norm, self.momentum))
        use_train_mode(self.classifier.norms())  # so that their running statistics count as state
        self.memory = ImageMemory(self.state)
        self.state.memory["seen"] = torch.zeros(self.classifier.num_classes, dtype=torch.int64)

    def commit(self, images: Tensor, step: Step) -> None:
        for image, label in zip(images, step.seen.lesson.labels, strict=True):
            self._remember(image, label)
            self.learn_if_due()

    def _remember(self, image: Tensor, label: Tensor) -> None:
        """Update the memory by prediction-balanced reservoir sampling."""
        of = int(label)
        seen = self.state.memory["seen"].clone()
        seen[of] += 1
        self.state.memory["seen"] = seen
        row, generator = {"image": image, "label": label}, self.predictor.generator
        if len(self.memory) < self.capacity:
            return self.memory.append(**row)
        crowded = self.memory.crowded(len(seen))
        if of not in crowded:
            return self.memory.replace(self.memory.any_of(crowded, generator), **row)
        share = float(self.memory.counts(len(seen))[of]) / float(seen[of])
        if float(torch.rand((), generator=generator)) <= share:
            return self.memory.replace(self.memory.any_of([of], generator), **row)
        return None
