"""SAFER-A: how much weight the original view deserves, image by image (paper, eq. 7-10).

A suspicion signal s becomes q in [0,1], and q the weight α of the original view, between α_clean and α_attacked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .gate import Gate
from .options import check
from .pooling import entropy, with_original
from .registry import Registry

FLOOR = 1e-8  # probabilities are floored here before their logarithm is compared


class Mixer(Protocol):
    """Anything that re-weights the original view against the augmented ones.

    least_views: augmented views without which it knows nothing.
    mix: final weights (V,B), and how suspicious every image looks (B,).
    teaches, if there is one: whether methods learn from what it makes of the views (default) or from pooling alone.
    remembering(base_weights, probs, features, seen), if there is one, is asked instead of mix where `memory` says that
        it remembers so many numbers from batch to batch; it gives them anew as a third. A method's state has them.
    pipeline, if there is one: the preset of the views it takes where the user names none.
    of_features(weights, base_weights), if there is one: weights (V,B) of the features that a method learns from which
        aligns features with scores, and of the head's scores of these; None: as pooled for every other method.
    """

    @property
    def least_views(self) -> int: ...

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]: ...


def signals(probs: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Every suspicion signal of every image, {name: (B,)}, from probs (V,B,K) and features (V,B,d).

    The augmented views speak with one voice, their mean. Without augmented views the original answers for them.
    """
    return {name: function(*_sides(probs), *_sides(features)) for name, function in SIGNALS.items()}


def signal(name: str, probs: Tensor, features: Tensor) -> Tensor:
    """One of the signals, (B,)."""
    if name not in SIGNALS:
        raise ValueError(f"signal {name!r} is unknown; expected one of {', '.join(SIGNALS)}")
    return SIGNALS[name](*_sides(probs), *_sides(features))


def _sides(views: Tensor) -> tuple[Tensor, Tensor]:
    """The original view and the mean of the augmented ones."""
    return views[0], views[1:].mean(dim=0) if len(views) > 1 else views[0]


def _margin(probs: Tensor) -> Tensor:
    if probs.shape[-1] == 1:
        return probs[..., 0]
    best, second = probs.topk(2, dim=-1).values.unbind(-1)
    return best - second


def _prob_disagreement(p: Tensor, q: Tensor) -> Tensor:
    """½ (KL(p‖q) + KL(q‖p))."""
    p, q = p.clamp_min(FLOOR), q.clamp_min(FLOOR)
    return 0.5 * ((p - q) * (p.log() - q.log())).sum(dim=-1)


def _feat_disagreement(z: Tensor, y: Tensor) -> Tensor:
    """1 - cos(z, y), clamped to what a cosine allows."""
    return (1 - F.cosine_similarity(z, y, dim=-1)).clamp(0, 2)


Signal = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SIGNALS: dict[str, Signal] = {  # of (p of the original, p of the augmented, z of the original, z of the augmented)
    "orig_conf": lambda p, q, z, y: p.amax(dim=-1),
    "orig_margin": lambda p, q, z, y: _margin(p),
    "aug_margin": lambda p, q, z, y: _margin(q),
    "orig_entropy": lambda p, q, z, y: entropy(p),
    "aug_entropy": lambda p, q, z, y: entropy(q),
    "margin_gap": lambda p, q, z, y: _margin(p) - _margin(q),
    "entropy_gap": lambda p, q, z, y: entropy(p) - entropy(q),
    "prob_disagreement": lambda p, q, z, y: _prob_disagreement(p, q),
    "feat_disagreement": lambda p, q, z, y: _feat_disagreement(z, y),
}

CURVES: dict[str, Callable[[Tensor, Mixing], Tensor]] = {
    "step": lambda o, mixing: (o >= 0).to(o.dtype),
    "linear": lambda o, mixing: (0.5 + o / mixing.delta).clamp(0, 1),
    "sigmoid": lambda o, mixing: torch.sigmoid(mixing.kappa * o),
}


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The paper's adaptive mixing. Defaults are its own, fixed for every dataset and method."""

    curve: str = "sigmoid"
    signal: str = "feat_disagreement"
    tau: float = 0.2
    kappa: float = 3.0
    delta: float = 0.1
    alpha_attacked: float = 0.25
    alpha_clean: float = 0.65
    higher_is_suspicious: bool = True

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ValueError(f"curve {self.curve!r} is unknown; expected one of {', '.join(CURVES)}")
        if self.signal not in SIGNALS:
            raise ValueError(f"signal {self.signal!r} is unknown; expected one of {', '.join(SIGNALS)}")
        for name in ("alpha_attacked", "alpha_clean"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a weight between 0 and 1")
        if self.delta <= 0:
            raise ValueError(f"delta is {self.delta}; expected the positive width of the linear curve")

    def alpha(self, signal: Tensor) -> Tensor:
        """The weight (B,) of the original view."""
        o = signal - self.tau if self.higher_is_suspicious else self.tau - signal
        q = CURVES[self.curve](o, self)
        return self.alpha_clean + q * (self.alpha_attacked - self.alpha_clean)

    @property
    def least_views(self) -> int:
        return 1

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Final weights (V,B): α for the original, the rest as the base weights share it; and suspicion (B,)."""
        found = signal(self.signal, probs, features)
        suspicion = found if self.higher_is_suspicious else -found  # whoever reads it takes more for more suspicious
        if len(base_weights) == 1:
            return base_weights, suspicion  # no augmented view to mix with
        return with_original(self.alpha(found).to(base_weights.dtype), base_weights), suspicion


_SHIPPED: dict[str, Callable[..., Mixer]] = {
    **{curve: functools.partial(Mixing, curve=curve) for curve in CURVES},
    "gate": Gate,
}
MIXINGS = Registry("mixing", _SHIPPED)


def create(mixing: str | Mapping[str, Any] | Mixer | None) -> Mixer | None:
    """A mixing by name (`sigmoid` is SAFER-A), from a name and arguments ({"name": "gate", "cost": 5}; without a name
    they are Mixing's), as it is, or none."""
    if isinstance(mixing, Mapping):
        name, options = mixing.get("name", "sigmoid"), {k: v for k, v in mixing.items() if k != "name"}
    elif mixing is None or (not isinstance(mixing, str | bool | type) and hasattr(mixing, "mix")):
        return mixing
    else:
        name, options = mixing, {}
    if name not in MIXINGS:
        raise ValueError(
            f"mixing {name!r} is unknown; expected one of {', '.join(MIXINGS)}, a Mixing, its arguments or None"
        )
    check(MIXINGS[name], options, f"mixing {name!r}")
    return MIXINGS[name](**options)


def settings(mixing: Mixer | None) -> dict[str, Any] | None:
    """What `create` makes it from again; of a mixing from elsewhere, what tells it from others."""
    if mixing is None:
        return None
    if type(mixing) is Mixing:
        return dataclasses.asdict(mixing)
    options: dict[str, Any] = dataclasses.asdict(mixing) if dataclasses.is_dataclass(mixing) else {}
    known = next((name for name, made in MIXINGS.items() if made is type(mixing)), type(mixing).__qualname__)
    return {"name": known, **options}
