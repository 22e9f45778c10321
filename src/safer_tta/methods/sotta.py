"""SoTTA: remember only confident images, all classes alike, and learn towards flat minima.

Gong et al., "SoTTA: Robust test-time adaptation on noisy data streams", NeurIPS 2023.
High-confidence uniform-class memory of 64 images (probability above 0.99); every 64 images one sharpness-aware step
(radius 0.05) on its entropy. Scale and shift of the norms learn; running statistics follow with momentum 0.2, and
answers are given with them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.norm import use_train_mode
from ..predictors import Prediction, Predictor
from .base import Closure
from .checks import count, positive, share
from .cost import Cost
from .image_memory import ImageMemory, RememberingMethod
from .losses import entropy
from .registry import register
from .sharpness import sharpness_aware_step


@register("sotta")
class SoTTA(RememberingMethod):
    updates = "norm"
    cost = Cost(3, 2, "1 + 2 of the memory forward, 2 backward")

    def __init__(
        self,
        predictor: Predictor,
        *,
        lr: float = 1e-3,
        threshold: float = 0.99,
        capacity: int = 64,
        every: int = 64,
        momentum: float = 0.2,
        radius: float = 0.05,
    ) -> None:
        count(capacity=capacity, every=every)
        share(threshold=threshold, momentum=momentum)
        positive(radius=radius)
        self.threshold, self.capacity, self.every = threshold, capacity, every
        self.momentum, self.radius = momentum, radius
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        norms = self.classifier.norms()
        use_train_mode(norms)
        for norm in norms:
            if isinstance(norm, _BatchNorm):
                norm.momentum = self.momentum
        self.memory = ImageMemory(self.state)

    def optimise(self, closure: Closure) -> None:
        assert self.optimizer is not None
        sharpness_aware_step(self.optimizer, closure, self.radius)

    def commit(self, images: Tensor, prediction: Prediction) -> None:
        confidence = prediction.probs.amax(dim=1)
        for image, label, sure in zip(images, prediction.labels, confidence > self.threshold, strict=True):
            if bool(sure):
                self._remember(image, label)
            if self.memory.due(self.every) and len(self.memory) > 1:  # one image has no statistics to learn with
                self.learn(self._memory_loss())

    def _remember(self, image: Tensor, label: Tensor) -> None:
        """A full memory makes room in its largest class, or in the image's own if that is among the largest."""
        if len(self.memory) >= self.capacity:
            crowded = self.memory.crowded(self.classifier.num_classes)
            of = int(label)
            self.memory.remove(self.memory.any_of([of] if of in crowded else crowded, self.predictor.generator))
        self.memory.append(image=image, label=label)

    def _memory_loss(self) -> Callable[[], Tensor]:
        images = self.memory["image"]
        draw = self.predictor.draw(images)
        return lambda: entropy(self.predictor.lesson(images, draw).logits).mean()
