"""SoTTA: remember only confident images, all classes alike, and learn towards flat minima.

Gong et al., "SoTTA: Robust test-time adaptation on noisy data streams", NeurIPS 2023.
High-confidence uniform-class memory of 64 images (probability above 0.99); every 64 images one sharpness-aware step
(radius 0.05) on its entropy. Scale and shift of the norms learn; running statistics follow with momentum 0.2, and
answers are given with them.
"""

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.norm import use_train_mode
from . import Closure, Cost, Step, count, option, positive, register, share
from ._frame.image_memory import ImageMemory, RememberingMethod
from ._frame.sharpness import sharpness_aware_step


@register("sotta")
class SoTTA(RememberingMethod):
    updates = "norm"
    cost = Cost(3, 2, "1 + 2 of the memory forward, 2 backward")
    lr: float = option(1e-3, positive)
    threshold: float = option(0.99, share)
    capacity: int = option(64, count)
    every: int = option(64, count)
    momentum: float = option(0.2, share)
    radius: float = option(0.05, positive)

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

    def commit(self, images: Tensor, step: Step) -> None:
        taught = step.seen.lesson
        sure = taught.probs.amax(dim=1) > self.threshold
        for image, label, confident in zip(images, taught.labels, sure, strict=True):
            if bool(confident):
                self._remember(image, label)
            self.learn_if_due()

    def _remember(self, image: Tensor, label: Tensor) -> None:
        """A full memory makes room in its largest class, or in the image's own if that is among the largest."""
        if len(self.memory) >= self.capacity:
            crowded = self.memory.crowded(self.classifier.num_classes)
            of = int(label)
            self.memory.remove(self.memory.any_of([of] if of in crowded else crowded, self.predictor.generator))
        self.memory.append(image=image, label=label)
