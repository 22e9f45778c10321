"""RTTDP, realistic test-time data poisoning (Su et al., ICLR 2025): an attacker who owns whole batches among others'.

The attacker knows the source model, not what became of it, and sees no image of others. A copy of the source model is
fitted to the answers to the attacker's own images. On this surrogate, which normalises with the batch as most methods
do, the images are driven to answers from which a method learns what is wrong:

- "nhe", notch high entropy: any class but the true one, all equally;
- "ble", balanced low entropy: one wrong class. The classes are matched one to one with those that they are most
  confused with, so that the poison stays balanced.

The features stay near those of the clean images, so that what is learnt carries over to the images of others.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .._internal.checks import one_of
from ..errors import InvalidValueError
from ..methods._frame.losses import cross_entropy
from ..models import Classifier
from .consistency import Consistency
from .matching import match
from .pgd import LEVELS, ascend
from .registry import Threat, register

FITS, RATE = 10, 0.1  # the steps of SGD for each batch of answers, and their size
KEPT = 0.8  # of the confusion of classes, with every batch
SURELY = 1e-8  # the least probability that an answer is taken to have


class Surrogate:
    """What the attacker remembers: the source model fitted to the answers, and how these confuse the classes.

    Attributes:
        classifier: The attacker's own copy, which normalises with the batch.
        confusion: The mean answer (K,K) to the images of every class, newer ones counting more.
    """

    def __init__(self, source: Classifier, threat: Threat) -> None:
        one_of(OBJECTIVES, objective=threat["objective"])
        self.classifier = source.eval().requires_grad_(False)
        for norm in source.norms():
            norm.training = True
        self.fitted = _named(source)
        for parameter in self.fitted.values():
            parameter.requires_grad_(True)
        self.confusion = torch.zeros(source.num_classes, source.num_classes, device=source.device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the class scores (B,K) of images in [0,1]."""
        with self.classifier.untracked():
            scores: Tensor = self.classifier(images)[1]
        return scores.float()

    def see(self, images: Tensor, labels: Tensor, probs: Tensor) -> None:
        """Fit the model to answers, by the symmetric Kullback-Leibler divergence."""
        with torch.inference_mode(False), torch.enable_grad():
            images, probs = self.ready(images), probs.detach().to(self.classifier.device, torch.float32, copy=True)
            self.confusion = self.confused(labels, probs)
            answered = probs.clamp_min(SURELY).log()
            for _ in range(FITS if self.fitted else 0):
                own = self(images).log_softmax(dim=1)
                apart = ((answered.exp() - own.exp()) * (answered - own)).sum(dim=1) / 2
                gradients = torch.autograd.grad(apart.mean(), list(self.fitted.values()))
                for parameter, gradient in zip(self.fitted.values(), gradients, strict=True):
                    parameter.data -= RATE * gradient

    def confused(self, labels: Tensor, probs: Tensor) -> Tensor:
        """Return the confusion of classes with further answers."""
        members = F.one_hot(labels.to(probs.device), len(self.confusion)).to(probs)  # (B,K)
        count = members.sum(dim=0)[:, None]
        mixed = KEPT * self.confusion + (1 - KEPT) * (members.T @ probs) / count.clamp_min(1)
        return torch.where(count > 0, mixed, self.confusion)

    def ready(self, images: Tensor) -> Tensor:
        """Return images in [0,1] on the device of the model."""
        moved = images.to(self.classifier.device, copy=True)
        return moved / LEVELS if moved.dtype == torch.uint8 else moved

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        live = self._live()
        if live.keys() != state.keys() or any(live[name].shape != tensor.shape for name, tensor in state.items()):
            raise InvalidValueError("the state is not that of an attacker with this source model; expected one that is")
        with torch.no_grad():
            for name, tensor in state.items():
                live[name].copy_(tensor)

    def _live(self) -> dict[str, Tensor]:
        return {**self.fitted, "confusion": self.confusion}


def rttdp(
    surrogate: Surrogate,
    images: Tensor,
    labels: Tensor,
    *,
    objective: str = "nhe",
    eps: float = 0.3,
    step: float = 0.01,
    steps: int = 40,
    norm: str = "linf",
) -> Tensor:
    """Poison a batch of the attacker's images in [0,1] on a surrogate; `start("rttdp", ...)` has the whole attacker."""
    with torch.inference_mode(False), torch.no_grad():
        images, labels = images.clone(), labels.to(images.device, copy=True)
        wanted = OBJECTIVES[objective](surrogate, images, labels)
    consistency = Consistency(surrogate.classifier, surrogate, images)

    def gradient(perturbed: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            perturbed = perturbed.detach().clone().requires_grad_(True)
            scores, penalty = consistency(perturbed)
            return -torch.autograd.grad(cross_entropy(wanted, scores).mean() + penalty, perturbed)[0]

    threat: dict[str, Any] = {"eps": eps, "step": step, "steps": steps, "norm": norm}
    return ascend(gradient, images, first=images, generator=None, **threat)


def notched(surrogate: Surrogate, images: Tensor, labels: Tensor) -> Tensor:
    """Return answers (B,K) that are uniform over all classes but the true one."""
    others = 1 - F.one_hot(labels, len(surrogate.confusion)).float()
    return others / others.sum(dim=1, keepdim=True)


def balanced(surrogate: Surrogate, images: Tensor, labels: Tensor) -> Tensor:
    """Return certain answers (B,K): the class that the true one is matched with, and no other class is."""
    gains = surrogate.confused(labels, surrogate(images).softmax(dim=1))
    classes = len(gains)
    gains.fill_diagonal_(-classes - 1.0)  # more than all others could gain together: no class is its own
    return F.one_hot(match(gains)[labels], classes).float()


OBJECTIVES: dict[str, Callable[[Surrogate, Tensor, Tensor], Tensor]] = {"nhe": notched, "ble": balanced}


@register(
    "rttdp", live=True, poisons=True, memory=Surrogate, eps=0.3, step=0.01, steps=40, options={"objective": "nhe"}
)
def poison_batch(
    surrogate: Surrogate, images: Tensor, labels: Tensor, threat: Threat, randomness: Generator, mine: Tensor
) -> Tensor:
    own = rttdp(surrogate, surrogate.ready(images[mine]), labels[mine], **threat).to(images.device)
    return (images / LEVELS if images.dtype == torch.uint8 else images).index_put((mine,), own)


def _named(source: Classifier) -> dict[str, Tensor]:
    """Return the parameters of normalisation layers by their names."""
    wanted = {id(parameter) for parameter in source.trainable_parameters("norm")}
    return {f"model.{name}": p for name, p in source.model.named_parameters() if id(p) in wanted}
