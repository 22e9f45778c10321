"""Feature consistency (Su et al., ICLR 2025): poisoned images whose features look as those of clean images do.

Before every normalisation layer, the features of an image are taken as a normal distribution over its places. The
penalty is the divergence of the clean image's distribution from that of the perturbed one. Its weight for each layer
grows by a step of gradient ascent as long as the layer differs, as a Lagrangian multiplier does. Channels are taken as
independent, since a small map has fewer places than channels.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..models import Classifier

ASCENT = 0.001  # the step of the weights
FLOOR = 1e-5  # added to variances

Moments = tuple[Tensor, Tensor]  # of every image and channel


class Consistency:
    """The penalty against the features that the clean images have.

    Args:
        classifier: The model whose features are compared.
        look: What runs a batch through it.
        images: The clean images.
    """

    def __init__(self, classifier: Classifier, look: Callable[[Tensor], Tensor], images: Tensor) -> None:
        self.classifier, self.look = classifier, look
        with torch.no_grad():
            self.clean = self._pass(images)[1]
        self.weights = torch.zeros(len(self.clean), device=images.device)

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return class scores of perturbed images and their penalty, and let the weights climb."""
        scores, found = self._pass(images)
        parts = [divergence(self.clean[layer], found[layer]).sum() for layer in self.clean]
        if not parts:
            return scores, scores.new_zeros(())
        apart = torch.stack(parts) / len(parts)
        penalty = (self.weights * apart).sum()
        self.weights = self.weights + ASCENT * apart.detach()
        return scores, penalty

    def _pass(self, images: Tensor) -> tuple[Tensor, dict[int, Moments]]:
        found: dict[int, Moments] = {}
        with _watched(self.classifier.norms(), found):
            return self.look(images), found


def divergence(clean: Moments, found: Moments) -> Tensor:
    """Return the Kullback-Leibler divergence of one normal distribution from another, summed over channels, (B,)."""
    (mean, variance), (other_mean, other_variance) = clean, found
    ratio = (variance + (mean - other_mean).square()) / other_variance
    return 0.5 * (ratio - 1 + (other_variance / variance).log()).sum(dim=1)


def moments(features: Tensor, norm: nn.Module) -> Moments | None:
    """Return the mean and variance (B,C) over the places of every image; None if features have no places."""
    last = isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and features.ndim == 3  # of tokens: channels come last
    places = (features.transpose(1, 2) if last else features).float().flatten(2) if features.ndim > 2 else None
    if places is None or places.shape[2] < 2:
        return None
    return places.mean(dim=2), places.var(dim=2, correction=0) + FLOOR


@contextlib.contextmanager
def _watched(norms: list[nn.Module], found: dict[int, Moments]) -> Iterator[None]:
    """Inside, note the moments of what enters every normalisation layer."""

    def note(layer: int, norm: nn.Module, entered: tuple[Tensor, ...]) -> None:
        seen = moments(entered[0], norm)
        if seen is not None:
            found[layer] = seen

    hooks = [norm.register_forward_pre_hook(functools.partial(note, layer)) for layer, norm in enumerate(norms)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
