"""Mixings weigh the original view against the augmented ones. SAFER-A is the paper's (eq. 7-10).

A suspicion signal s becomes q in [0,1], and q the weight α of the original view, between α_clean and α_attacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._internal.checks import flag, not_negative, one_of, positive, share
from ._internal.registry import Registry
from ._internal.signatures import changed_fields, check_options
from .errors import InvalidTypeError
from .gate import Gate
from .pooling import Verdict, entropy, with_original

FLOOR = 1e-8  # probabilities are floored here before their logarithm is compared


@runtime_checkable
class Mixing(Protocol):
    """Anything that weighs the original view against the augmented ones.

    Attributes:
        version: Raised when its decisions change; a part of the names of runs.
        least_views: How many augmented views it needs.
        preset: The preset of views that it takes if the user names none.
        norm: What replaces the batch norms if the user names nothing, a key of `NORMS`; None keeps them.
        estimates_suspicion: Whether its verdicts say how probable it is that an image is attacked.
    """

    @property
    def version(self) -> int: ...
    @property
    def least_views(self) -> int: ...
    @property
    def preset(self) -> str: ...
    @property
    def norm(self) -> str | None: ...
    @property
    def estimates_suspicion(self) -> bool: ...

    def memory_size(self, features: int) -> int:
        """Return how many numbers it remembers from batch to batch; a method's saved state has them."""
        ...

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        """Decide about a batch.

        Args:
            base: Weights (V,B) of the pooling rule.
            probs: Probabilities (V,B,K) of every view.
            features: Features (V,B,d) of every view.
            memory: What earlier batches left, (memory_size,); zeros at the start of a stream.
        """
        ...


MIXINGS: Registry[Callable[..., Mixing]] = Registry("mixing")
register = MIXINGS.register
register("gate")(Gate)


@register("none")
class NoMixing:
    """SAFER without mixing: answer with, and learn from, the weights of the pooling rule."""

    version: ClassVar[int] = 1
    least_views: ClassVar[int] = 0
    preset: ClassVar[str] = "released"
    norm: ClassVar[str | None] = None
    estimates_suspicion: ClassVar[bool] = False

    def memory_size(self, features: int) -> int:
        return 0

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        disagreement = signal("feat_disagreement", probs.detach(), features.detach())
        return Verdict(base, base, signals={"feat_disagreement": disagreement})


def signals(probs: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Return every suspicion signal of every image, {name: (B,)}, of views with probs (V,B,K) and features (V,B,d).

    The original is compared with the mean of the augmented views; without augmented views, with itself.
    """
    return {name: signal(name, probs, features) for name in SIGNALS}


def signal(name: str, probs: Tensor, features: Tensor) -> Tensor:
    """Return one of the signals, (B,)."""
    one_of(SIGNALS, signal=name)
    return SIGNALS[name](*_sides(probs), *_sides(features))


def _sides(views: Tensor) -> tuple[Tensor, Tensor]:
    """Return the original view and the mean of the augmented ones."""
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
    "feat_disagreement": lambda p, q, z, y: (1 - F.cosine_similarity(z, y, dim=-1)).clamp(0, 2),
}

CURVES: dict[str, Callable[[Tensor, AdaptiveMixing], Tensor]] = {
    "step": lambda o, mixing: (o >= 0).to(o.dtype),
    "linear": lambda o, mixing: (0.5 + o / mixing.delta).clamp(0, 1),
    "sigmoid": lambda o, mixing: torch.sigmoid(mixing.kappa * o),
}


@register("sigmoid")
@dataclass(frozen=True, kw_only=True)
class AdaptiveMixing:
    """The paper's adaptive mixing, SAFER-A. Defaults are its own, the same for every dataset and method.

    Args:
        curve: How a signal becomes q: step, linear or sigmoid.
        signal: Which signal, a key of `SIGNALS`.
        tau: The threshold of the signal.
        kappa: The slope of the sigmoid curve.
        delta: The width of the linear curve.
        alpha_attacked: Weight of an original that looks attacked.
        alpha_clean: Weight of an original that looks clean.
        higher_is_suspicious: Whether a high signal means that an image is suspicious.
    """

    curve: str = "sigmoid"
    signal: str = "feat_disagreement"
    tau: float = 0.2
    kappa: float = 3.0
    delta: float = 0.1
    alpha_attacked: float = 0.25
    alpha_clean: float = 0.65
    higher_is_suspicious: bool = True

    version: ClassVar[int] = 1
    least_views: ClassVar[int] = 1
    preset: ClassVar[str] = "released"
    norm: ClassVar[str | None] = None
    estimates_suspicion: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of(CURVES, curve=self.curve)
        one_of(SIGNALS, signal=self.signal)
        share(alpha_attacked=self.alpha_attacked, alpha_clean=self.alpha_clean)
        not_negative(kappa=self.kappa)
        positive(delta=self.delta)
        flag(higher_is_suspicious=self.higher_is_suspicious)

    def memory_size(self, features: int) -> int:
        return 0

    def alpha(self, signal: Tensor) -> Tensor:
        """Return the weight (B,) of the original view."""
        o = signal - self.tau if self.higher_is_suspicious else self.tau - signal
        q = CURVES[self.curve](o, self)
        return self.alpha_clean + q * (self.alpha_attacked - self.alpha_clean)

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        """Give the original the weight α; the augmented views share the rest as the base weights say."""
        found = signal(self.signal, probs, features)
        signals = {self.signal: (found if self.higher_is_suspicious else -found).detach()}
        if len(base) == 1:  # no augmented view to mix with
            return Verdict(base, base, signals=signals)
        weights = with_original(self.alpha(found).to(base.dtype), base)
        return Verdict(weights, weights, signals=signals)


register("step")(functools.partial(AdaptiveMixing, curve="step"))
register("linear")(functools.partial(AdaptiveMixing, curve="linear"))


def create(mixing: str | Mapping[str, Any] | Mixing) -> Mixing:
    """Return a mixing from its name, from a name and options such as {"name": "gate", "cost": 5}, or as it is."""
    if isinstance(mixing, Mixing) and not isinstance(mixing, type):
        return mixing
    if not isinstance(mixing, (str, Mapping)):
        raise InvalidTypeError(
            f"mixing is {mixing!r}; expected one of {', '.join(MIXINGS)}, a dict of a name and options, or an object "
            "that has all that `safer_tta.Mixing` lists"
        )
    options = {"name": mixing} if isinstance(mixing, str) else dict(mixing)
    name = options.pop("name", "sigmoid")
    made = MIXINGS.find(name)
    check_options(made, options, f"mixing {name!r}")
    return made(**options)


def settings(mixing: Mixing) -> dict[str, Any]:
    """Return a name, and the options that differ from their defaults: `create` makes the mixing again from these."""
    known = (name for name, made in MIXINGS.items() if made is type(mixing))
    return {"name": next(known, type(mixing).__qualname__), **changed_fields(mixing)}
