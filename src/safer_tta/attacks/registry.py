"""Attacks that are prepared on the attacker's own model, by name. An attack is one file in this folder with one
decorator; plans, commands and stores know it by being there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Generator, Tensor

from ..models import Classifier
from ..registry import Registry


class Make(Protocol):
    def __call__(
        self, surrogate: Classifier, images: Tensor, labels: Tensor, threat: Mapping[str, Any], randomness: Generator
    ) -> Tensor: ...


@dataclass(frozen=True)
class Attack:
    """make: attacked images within the threat {eps, norm, step, steps}, from a generator on the CPU.

    own_steps: it chooses the number and size of its steps itself. passes: of one image through the model, forward and
    backward, to estimate its time; of one step unless they are its own.
    """

    make: Make
    own_steps: bool
    passes: float


ATTACKS: Registry[Attack] = Registry("attack")


def register(name: str, *, own_steps: bool = False, passes: float = 3) -> Callable[[Make], Make]:
    """Make an attack known under a name."""

    def decorate(make: Make) -> Make:
        ATTACKS[name] = Attack(make, own_steps, passes)
        return make

    return decorate
