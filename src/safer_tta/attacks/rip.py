"""RIP, reusing incorrect predictions: images that were answered wrongly are sent again and again.

The attacker perturbs nothing. Every image is a real one, and was the attacker's before: it takes the place of another
one of its class, so the classes of the stream stay as they were. A method that learns from its answers learns the same
mistakes once more each time. There is no budget, since no image is changed.
"""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from ..models import Classifier
from .registry import Threat, register


class Misread:
    """What the attacker remembers: own images (N,3,H,W) whose last answer was wrong, and their classes (N,)."""

    def __init__(self, source: Classifier, threat: Threat) -> None:
        self.images: Tensor | None = None
        self.labels = torch.zeros(0, dtype=torch.int64)

    def see(self, images: Tensor, labels: Tensor, probs: Tensor) -> None:
        """Keep the images that were answered wrongly."""
        labels = labels.cpu()
        wrong = probs.argmax(dim=1).cpu() != labels
        found = _levels(images)[wrong]
        self.images = found if self.images is None else torch.cat([self.images, found])
        self.labels = torch.cat([self.labels, labels[wrong]])

    def take(self, label: int, randomness: Generator) -> Tensor | None:
        """Take one of the images of a class out; None if there is none."""
        places = torch.nonzero(self.labels == label).flatten()
        if self.images is None or not len(places):
            return None
        chosen = int(places[int(torch.randint(len(places), (), generator=randomness))])
        taken = self.images[chosen]
        rest = torch.arange(len(self.labels)) != chosen
        self.images, self.labels = self.images[rest], self.labels[rest]
        return taken

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.images is None else {"images": self.images.clone(), "labels": self.labels.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.images = state["images"].clone() if state else None
        self.labels = state["labels"].clone() if state else torch.zeros(0, dtype=torch.int64)


@register("rip", live=True, poisons=True, memory=Misread, own_steps=True, passes=0, norms=(), exceeds=lambda *_: None)
def send_again(
    misread: Misread, images: Tensor, labels: Tensor, threat: Threat, randomness: Generator, mine: Tensor
) -> Tensor:
    sent = _levels(images)
    for place in torch.nonzero(mine.cpu()).flatten().tolist():
        again = misread.take(int(labels[place]), randomness)
        if again is not None:
            sent[place] = again
    return (sent / 255).to(images.device)


def _levels(images: Tensor) -> Tensor:
    """Return a copy of images as bytes, on the CPU."""
    return (images if images.dtype == torch.uint8 else (images * 255).round().byte()).cpu().clone()
