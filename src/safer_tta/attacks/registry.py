"""Attacks by name. An attack is one file in this folder with one decorator; it is known because it is there."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Generator, Tensor

from .._internal.registry import Registry
from ..errors import InvalidValueError
from ..models import Classifier

MULTIPLIES = ("steps", "draws", "restarts", "queries", "rounds")  # options that multiply what an attack costs
Threat = Mapping[str, Any]  # eps, norm, step, steps and what an attack takes besides


class Make(Protocol):
    """Attack images within a threat {eps, norm, step, steps, ...}; randomness comes from a generator on the CPU.

    One that poisons is also told which images of the batch are the attacker's, and changes only these.
    """

    def __call__(
        self, model: Any, images: Tensor, labels: Tensor, threat: Threat, randomness: Generator, *mine: Tensor
    ) -> Tensor: ...


def exceeds_ball(change: Tensor, threat: Threat) -> str | None:
    """Say how a change of pixels (B,C,H,W) exceeds `eps` in the norm of the threat; None if it does not."""
    lengths = change.flatten(1)
    size = float((lengths.abs() if threat["norm"] == "linf" else lengths.norm(dim=1)).max())
    if size > threat["eps"] + 0.5 / 255:  # a budget between two levels may be rounded up to one
        return f"changed an image by {size:.4f} ({threat['norm']}); allowed is {threat['eps']:.4f}"
    return None


class Memory(Protocol):
    """What an attacker keeps from batch to batch, all of it tensors: a killed run resumes with it."""

    def see(self, images: Tensor, labels: Tensor, probs: Tensor) -> None:
        """Take note of the answers (M,K) to the attacker's own images (M,3,H,W) and their true classes (M,)."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Attack:
    """A registered attack."""

    name: str
    # The attack itself. Its model is the attacker's own Classifier; if it is live, the deployed Predictor, or what
    # `memory` and `adapts` say.
    make: Make
    # whether it attacks the deployed predictor, batch by batch, and not a surrogate ahead of the stream
    live: bool = False
    # whether it changes the attacker's images to harm the answers to the others; a live one is told which they are
    poisons: bool = False
    adapts: bool = False  # whether it is made on the deployed Method, of which it lets copies adapt
    # what starts the memory on which it is made, if its attacker knows the source model and the answers only
    memory: Callable[[Classifier, Threat], Memory] | None = None
    eps: float = 8 / 255  # its budget by default
    steps: int = 20  # how many steps it takes by default
    step: float = 2 / 255  # how large they are by default
    own_steps: bool = False  # whether it chooses the number and the size of its steps itself
    passes: float = 3  # forward passes of an image that a step costs, or the whole attack if it chooses its steps
    # what it takes besides the budget, with defaults
    options: Mapping[str, Any] = field(default_factory=dict)
    # the versions of what else its images depend on, such as the defence that it is made through
    parts: Callable[[Threat], Mapping[str, int]] = lambda threat: {}
    norms: tuple[str, ...] = ("linf", "l2")  # in which it keeps a budget eps; none if its budget is another one
    # what says how a change exceeds the budget, or None
    exceeds: Callable[[Tensor, Threat], str | None] = exceeds_ball
    version: int = 1  # raised when its images change; a part of the names of runs and of attacked copies

    def cost(self, threat: Threat) -> float:
        """Return how many forward passes of an image it costs, and of each of its views."""
        told = {**self.options, **threat}
        return self.passes * float(math.prod(told.get(name, 1) for name in MULTIPLIES))

    def raised_versions(self, threat: Threat) -> dict[str, int]:
        """Return its version and those of its parts, for a definition; nothing until one has been raised."""
        versions = {"version": self.version, **self.parts({**self.options, **threat})}
        return {part: version for part, version in versions.items() if version != 1}

    def perturb(
        self, model: Any, images: Tensor, labels: Tensor, threat: Threat, randomness: Generator, *mine: Tensor
    ) -> Tensor:
        """Attack images of bytes and return bytes; refuse what the threat does not allow."""
        attacked = self.make(model, images, labels, threat, randomness, *mine)
        levels = (attacked * 255).round()
        if levels.shape != images.shape:
            raise InvalidValueError(
                f"{self.name} made images of shape {tuple(levels.shape)} from {tuple(images.shape)}; expected the same"
            )
        if not bool(((levels >= 0) & (levels <= 255)).all()):
            raise InvalidValueError(f"{self.name} made values outside [0,1]; expected images")
        excess = self.exceeds((levels - images) / 255, threat)
        if excess is not None:
            raise InvalidValueError(f"{self.name} {excess}")
        return levels.byte()


ATTACKS: Registry[Attack] = Registry("attack", Attack)
register = ATTACKS.register


def describe(name: str) -> dict[str, Any]:
    """Return what a user wants to know of an attack: what it goes through, its steps, its options, and its idea."""
    known = ATTACKS.find(name)
    about = sys.modules[known.make.__module__].__doc__ or ""
    return {
        "through": _through(known),
        "steps": known.options.get("steps") if known.own_steps else known.steps,
        "options": dict(known.options),
        "what": about.partition("\n")[0],
    }


def _through(attack: Attack) -> str:
    if attack.memory is not None:
        return "the source model and the answers"
    if attack.adapts:
        return "the deployed method"
    return "the deployed predictor" if attack.live else "a surrogate"
