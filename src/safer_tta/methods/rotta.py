"""RoTTA: statistics, memory and teacher that a changing, correlated stream cannot pull away.

Yuan et al., "Robust test-time adaptation in dynamic scenarios", CVPR 2023.
Robust batch norm: statistics are a running mean (0.05 of each new batch) and are what normalises. A memory of 64
images, balanced over predicted classes, drops what is old and uncertain. Every 64 images the student learns, on
strongly augmented memory images, the teacher's answers on the plain ones, younger images counting more; the teacher
follows (0.999). Answers are the teacher's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..models.norm import running_statistics, successor, use_train_mode
from ..predictors import Draw
from . import Cost, Method, Step, count, option, positive, register, share
from ._frame.augmentations import strong
from ._frame.image_memory import ImageMemory
from ._frame.losses import cross_entropy, largest_entropy, softmax_entropy
from ._frame.teacher import follow, make_teacher


class RobustBatchNorm(nn.BatchNorm2d):
    """In train mode, normalises with the running statistics after the batch has moved them."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            exact = x.to(torch.promote_types(x.dtype, torch.float32))
            batch_var, batch_mean = torch.var_mean(exact, dim=(0, 2, 3), correction=0)
            mean, var = torch.lerp(mean, batch_mean, self.momentum), torch.lerp(var, batch_var, self.momentum)
            if self.track_running_stats:
                self.running_mean.copy_(mean.detach())
                self.running_var.copy_(var.detach())
        scale = torch.rsqrt(var + self.eps)
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        return (x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(x.dtype)


@register("rotta")
class RoTTA(Method):
    updates = "norm"
    own_norms = True
    cost = Cost(3, 1, "1 + 2 of the memory forward, 1 backward")
    by_predictor = False
    lr: float = option(1e-3, positive)
    capacity: int = option(64, count)
    every: int = option(64, count)
    momentum: float = option(0.05, share)
    keep: float = option(0.999, share)

    def prepare(self) -> None:
        self.classifier.replace_norms(lambda norm: successor(RobustBatchNorm, norm, self.momentum))
        use_train_mode(self.classifier.norms())
        self.teacher = make_teacher(self.predictor, self.state)
        self.memory = ImageMemory(self.state, "uncertainty", "age")

    def forward(self, images: Tensor, draw: Draw) -> Step:
        self.memory.check_size(images)
        with running_statistics(self.teacher.classifier.norms()):
            return Step(self.teacher.look(images, draw), None)

    def commit(self, images: Tensor, step: Step) -> None:
        taught = step.seen.lesson
        for image, label, h in zip(images, taught.labels, softmax_entropy(taught.logits), strict=True):
            self._remember(image, label, h)
            if self.memory.due(self.every):
                self.learn(self._memory_loss())
                follow(self.teacher, self.predictor, self.keep)

    def _remember(self, image: Tensor, label: Tensor, uncertainty: Tensor) -> None:
        """Add an image, balanced over classes. If one must go, it is the oldest and least certain one that is worse."""
        counts = self.memory.counts(self.classifier.num_classes)
        new = {"image": image, "label": label, "uncertainty": uncertainty, "age": torch.zeros_like(uncertainty)}
        crowded: list[int] | None = None
        if float(counts[int(label)]) >= self.capacity / self.classifier.num_classes:
            crowded = [int(label)]
        elif len(self.memory) >= self.capacity:
            crowded = self.memory.crowded(self.classifier.num_classes)
        if crowded is None:
            self.memory.append(**new)
        else:
            worst, score = self._worst(crowded)
            if score > float(self._score(new["age"], uncertainty)):
                self.memory.remove(worst)
                self.memory.append(**new)
        if len(self.memory):
            self.memory["age"] = self.memory["age"] + 1

    def _score(self, age: Tensor, uncertainty: Tensor) -> Tensor:
        old = torch.sigmoid(age / self.capacity)
        return old + uncertainty / largest_entropy(self.classifier.num_classes)

    def _worst(self, labels: list[int]) -> tuple[int, float]:
        scores = self._score(self.memory["age"], self.memory["uncertainty"])
        among = torch.isin(self.memory["label"], torch.tensor(labels, device=scores.device))
        scores = torch.where(among, scores, -torch.inf)
        worst = int(scores.argmax())
        return worst, float(scores[worst])

    def _memory_loss(self) -> Callable[[], Tensor]:
        images, age = self.memory["image"], self.memory["age"] / self.capacity
        draw = self.predictor.draw(images)
        augmented = strong(images, self.predictor.generator)
        timeliness = torch.exp(-age) / (1 + torch.exp(-age))
        with torch.no_grad():
            target = self.teacher.look(images, draw).lesson.probs

        def loss() -> Tensor:
            student = self.predictor.look(augmented, draw).lesson
            return (cross_entropy(target, student.logits) * timeliness).mean()

        return loss
