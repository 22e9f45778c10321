"""Where attacks drive images: away from their own classes, or, with a target, towards other classes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._internal.checks import one_of

# From the true classes (B,) and the number of classes to the classes that the attacker wants.
TARGETS: dict[str, Callable[[Tensor, int], Tensor]] = {"next": lambda labels, classes: (labels + 1) % classes}


def check_target(target: str | None) -> None:
    """Accept a name of `TARGETS`, or None for an attacker to whom any wrong class will do."""
    if target is not None:
        one_of(TARGETS, target=target)


def cross_entropy(logits: Tensor, labels: Tensor, target: str | None = None) -> Tensor:
    """Return what an attacker climbs: the summed loss of the true classes, or that of the targets with a minus."""
    if target is None:
        return F.cross_entropy(logits, labels, reduction="sum")
    return -F.cross_entropy(logits, TARGETS[target](labels, logits.shape[1]), reduction="sum")


def rivals(logits: Tensor, labels: Tensor, target: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the classes (B,1) whose scores an attacker raises and lowers.

    Raised is the best wrong class, and the true class is lowered. With a target, the target is raised, and the best of
    all other classes is lowered.
    """
    named = (labels if target is None else TARGETS[target](labels, logits.shape[1]))[:, None]
    best = logits.scatter(1, named, -torch.inf).argmax(dim=1, keepdim=True)
    return (best, named) if target is None else (named, best)


def margin(logits: Tensor, raised: Tensor, lowered: Tensor) -> Tensor:
    """Return by how much the raised class of every image leads the lowered one, (B,)."""
    return (logits.gather(1, raised) - logits.gather(1, lowered)).squeeze(1)
