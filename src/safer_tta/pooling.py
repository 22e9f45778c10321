"""Reliability of a view and the rules that turn it into weights (paper, eq. 3-6).

Views come first: probs (V,B,K), features (V,B,d), weights (V,B). View 0 is the original image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .registry import Registry

Rule = Callable[[Tensor, Tensor], Tensor]
RULES: Registry[Rule] = Registry("pooling rule")

BY_AGREEMENT = {"cc", "cc_drop"}  # rules that need several images to compare views on
LITTLE = 1e-8  # augmented views that share no more than this share it alike
NOTHING = 1e-6  # weights that sum to no more than this say nothing: use all views alike


@dataclass(frozen=True)
class Pooled:
    """Weights (V,B) that sum to one over the views, the reliability (V,) behind them, and the dropped view's index
    (a scalar tensor, -1 if none was dropped)."""

    weights: Tensor
    reliability: Tensor
    dropped: Tensor


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a function of (probs, features) -> raw weights, (V,B) or (V,1) where the batch shares them."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


def reliability(features: Tensor) -> Tensor:
    """r_v (V,): the average cross-correlation of view v with every other view, over batch and dimensions."""
    if features.ndim != 3:
        raise ValueError(f"features are {tuple(features.shape)}; expected (V,B,d)")
    views, batch, dimensions = features.shape
    if views == 1:
        return features.new_zeros(1, dtype=_at_least_single(features))
    z = features.to(_at_least_single(features))
    z = z - z.mean(dim=1, keepdim=True)
    z = z / (torch.sqrt(z.square().mean(dim=1, keepdim=True) + 1e-6) + 1e-6)
    z = z.flatten(1)
    correlation = (z @ z.T) / (batch * dimensions)
    # Exactly symmetric and without the diagonal: with two views both must come out equal to the last bit, a tie.
    correlation = (correlation + correlation.T) / 2
    others = 1 - torch.eye(views, device=z.device, dtype=z.dtype)
    return (correlation * others).sum(dim=1) / (views - 1)


def weights(name: str, probs: Tensor, features: Tensor) -> Tensor:
    """Weights (V,B) of every view for every image under the named rule."""
    return pool(name, probs, features).weights


def pool(name: str, probs: Tensor, features: Tensor) -> Pooled:
    """Weights and what they rest on."""
    check_rule(name)
    if probs.ndim != 3 or features.ndim != 3 or probs.shape[:2] != features.shape[:2]:
        raise ValueError(
            f"probs {tuple(probs.shape)} and features {tuple(features.shape)} do not belong together; "
            "expected (V,B,K) and (V,B,d)"
        )
    raw = RULES[name](probs, features)
    total = raw.sum(dim=0, keepdim=True)
    normalised = torch.where(total > NOTHING, raw / total.clamp_min(NOTHING), 1 / len(raw))
    with torch.no_grad():
        agreement = reliability(features)
    return Pooled(normalised.expand(probs.shape[:2]).contiguous(), agreement, _dropped(normalised.detach()))


def with_original(alpha: Tensor, base_weights: Tensor) -> Tensor:
    """Weights (V,B): α (B,) for the original, the rest for the augmented views as the base weights share it."""
    augmented = base_weights[1:]
    total = augmented.sum(dim=0, keepdim=True)
    shares = torch.where(total > LITTLE, augmented / total.clamp_min(LITTLE), 1 / len(augmented))
    return torch.cat([alpha[None], (1 - alpha) * shares])


def _dropped(weights: Tensor) -> Tensor:
    """The view that the whole batch goes without, -1 where there is none or every image has weights of its own."""
    first = weights[:, 0]
    shared = weights.shape[1] == 1
    return torch.where(first.amin() == 0, first.argmin(), -1) if shared else torch.full_like(first.argmin(), -1)


def check_rule(name: str) -> None:
    if name not in RULES:
        raise ValueError(f"pooling rule {name!r} is unknown; expected one of {', '.join(RULES)}")


def entropy(probs: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats; 0·log 0 = 0, with a finite gradient."""
    return -(probs * probs.clamp_min(1e-12).log()).sum(dim=-1)


@rule("mean")
def mean(probs: Tensor, features: Tensor) -> Tensor:
    return torch.ones_like(probs[:, :1, 0])


@rule("entropy")
def confident(probs: Tensor, features: Tensor) -> Tensor:
    """1 - H / log K: confident views count more, image by image."""
    classes = probs.shape[2]
    if classes == 1:
        return torch.ones_like(probs[..., 0])
    return (1 - entropy(probs) / math.log(classes)).clamp_min(0)


@rule("top1")
def top1(probs: Tensor, features: Tensor) -> Tensor:
    return probs.amax(dim=-1)


@rule("cc")
def cc(probs: Tensor, features: Tensor) -> Tensor:
    """Reliability, negative ones clipped: an anti-correlated view says nothing."""
    return reliability(features).clamp_min(0)[:, None].to(probs.dtype)


@rule("cc_drop")
def cc_drop(probs: Tensor, features: Tensor) -> Tensor:
    """As cc, and the least reliable view (the first of several) gets nothing."""
    rho = cc(probs, features)
    least = rho.detach().argmin(dim=0)
    return rho.index_fill(0, least, 0)


def _at_least_single(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
