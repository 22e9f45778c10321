"""Reliability of a view and the rules that turn it into weights (paper, eq. 3-6).

Views come first: probs (V,B,K), features (V,B,d), weights (V,B). View 0 is the original image.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._internal.registry import Registry
from .errors import InvalidValueError

LITTLE = 1e-8  # if the augmented views' weights sum to no more than this, they share equally
NOTHING = 1e-6  # if all weights sum to no more than this, all views share equally


@dataclass(frozen=True)
class Rule:
    """A pooling rule: a function of (probs, features) -> raw weights, (V,B), or (V,1) if the batch shares them."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]  # the rule itself
    compares_views: bool = False  # whether it compares views over a batch, so that it needs several images
    version: int = 1  # raised when its weights change; a part of the names of runs


RULES: Registry[Rule] = Registry("pool", Rule)
register = RULES.register


@dataclass(frozen=True)
class Pooled:
    """What a rule makes of a batch."""

    weights: Tensor  # (V,B), summing to one over the views
    reliability: Tensor  # (V,), the agreement of each view with the others
    dropped: Tensor  # a scalar: the index of the view that got no weight in the whole batch, -1 if none was dropped


@dataclass(frozen=True)
class Verdict:
    """What a mixing decides about a batch, once. Weights are (V,B) and sum to one over the views.

    Attributes:
        answer: Weights of the probabilities that are answered.
        lesson: Weights of the probabilities that methods learn from; may be the same object as `answer`.
        aligned: Weights of features, and of the head's scores of them, for methods that align the one with the other.
            None: these get the lesson, as all others.
        suspicion: The probability (B,) that an image is attacked, if the mixing estimates one.
        signals: Other figures (B,) by name, oriented so that more is more suspicious.
        memory: What to remember from this batch on, if it is learnt from.
    """

    answer: Tensor
    lesson: Tensor
    aligned: Tensor | None = None
    suspicion: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None


def reliability(features: Tensor) -> Tensor:
    """Return r_v (V,), the average cross-correlation of view v with every other view, over batch and dimensions."""
    if features.ndim != 3:
        raise InvalidValueError(f"features are {tuple(features.shape)}; expected (V,B,d)")
    views, batch, dimensions = features.shape
    z = features.to(torch.promote_types(features.dtype, torch.float32))
    if views == 1:
        return z.new_zeros(1)
    z = z - z.mean(dim=1, keepdim=True)
    z = z / (torch.sqrt(z.square().mean(dim=1, keepdim=True) + 1e-6) + 1e-6)
    z = z.flatten(1)
    correlation = (z @ z.T) / (batch * dimensions)
    # Exactly symmetric and without the diagonal: with two views both must come out equal to the last bit, a tie.
    correlation = (correlation + correlation.T) / 2
    others = 1 - torch.eye(views, device=z.device, dtype=z.dtype)
    return (correlation * others).sum(dim=1) / (views - 1)


def weights(name: str, probs: Tensor, features: Tensor) -> Tensor:
    """Return the weight (V,B) of every view for every image under the named rule."""
    return pool(name, probs, features).weights


def pool(name: str, probs: Tensor, features: Tensor) -> Pooled:
    """Return the weights of the views under the named rule, and the reliability behind them."""
    rule = RULES.find(name)
    if probs.ndim != 3 or features.ndim != 3 or probs.shape[:2] != features.shape[:2]:
        raise InvalidValueError(
            f"probs {tuple(probs.shape)} and features {tuple(features.shape)} do not fit each other; "
            "expected (V,B,K) and (V,B,d)"
        )
    raw = rule.function(probs, features)
    total = raw.sum(dim=0, keepdim=True)
    normalised = torch.where(total > NOTHING, raw / total.clamp_min(NOTHING), 1 / len(raw))
    with torch.no_grad():
        agreement = reliability(features)
        # A view goes unused in the whole batch only if all images have the same weights.
        unused = (normalised.amin() == 0) & (normalised.shape[1] == 1)
        dropped = torch.where(unused, normalised[:, 0].argmin(), -1)
    return Pooled(normalised.expand(probs.shape[:2]).contiguous(), agreement, dropped)


def with_original(alpha: Tensor, base_weights: Tensor) -> Tensor:
    """Return weights (V,B): α (B,) for the original; the augmented views share the rest as the base weights say."""
    augmented = base_weights[1:]
    total = augmented.sum(dim=0, keepdim=True)
    shares = torch.where(total > LITTLE, augmented / total.clamp_min(LITTLE), 1 / len(augmented))
    return torch.cat([alpha[None], (1 - alpha) * shares])


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy over the last dimension, in nats; 0·log 0 = 0, with a finite gradient."""
    return -(probs * probs.clamp_min(1e-12).log()).sum(dim=-1)


@register("mean")
def mean(probs: Tensor, features: Tensor) -> Tensor:
    return torch.ones_like(probs[:, :1, 0])


@register("entropy")
def confident(probs: Tensor, features: Tensor) -> Tensor:
    """Weigh views by 1 - H / log K: confident views count more, image by image."""
    classes = probs.shape[2]
    if classes == 1:
        return torch.ones_like(probs[..., 0])
    return (1 - entropy(probs) / math.log(classes)).clamp_min(0)


@register("top1")
def top1(probs: Tensor, features: Tensor) -> Tensor:
    return probs.amax(dim=-1)


@register("cc", compares_views=True)
def cc(probs: Tensor, features: Tensor) -> Tensor:
    """Weigh views by reliability; a negative one counts as 0."""
    return reliability(features).clamp_min(0)[:, None].to(probs.dtype)


@register("cc_drop", compares_views=True)
def cc_drop(probs: Tensor, features: Tensor) -> Tensor:
    """Weigh views as `cc`, but drop the least reliable one (the first of several)."""
    rho = cc(probs, features)
    least = rho.detach().argmin(dim=0)
    return rho.index_fill(0, least, 0)
