"""An attacker in the loop of a stream: changes its own images batch by batch, sees their answers, and remembers.

`start` starts the attacker of any live attack. Some know the method that is attacked, and look at it as it stands.
Others know only the source model, and use the answers that they remember to estimate how it has adapted.

    attacker = start("rttdp", source_model, seed=0)
    for number, (images, labels, mine) in enumerate(batches):
        sent = attacker.perturb(images, labels, mine, number)
        answer = adapted(sent)
        attacker.see(sent[mine], labels[mine], answer.probs[mine])
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._internal.checks import whole
from .._internal.seeds import generator
from ..errors import InvalidTypeError, InvalidValueError
from ..methods import Method
from ..models import Classifier
from .pgd import LEVELS, check_labels
from .registry import ATTACKS, Attack, Memory, Threat
from .threat import full_threat


def start(attack: str, victim: Method | nn.Module, *, seed: int = 0, **threat: Any) -> "Attacker":
    """Start the attacker of a live attack.

    Args:
        attack: The name of a live attack; `ATTACKS[name].live` says which are.
        victim: What the attacker knows. It is the source model if the attack has a `memory`: the attacker takes a copy.
            Otherwise it is the method that is attacked, which the attacker does not move.
        seed: Decides all that is random about the attacker.
        **threat: The budget and the attack's own options, as `full_threat` takes them.

    Raises:
        UnknownNameError: If there is no such attack.
        InvalidValueError: If the attack is made ahead of a stream, or does not see all that the method answers with.
        InvalidTypeError: If the victim is of the wrong type, or the attack has no such option.
    """
    known = ATTACKS.find(attack)
    whole(seed=seed)
    if not known.live:
        raise InvalidValueError(
            f"attack {attack!r} is made on a surrogate ahead of a stream, so there is no attacker to start; expected "
            f"one of {', '.join(sorted(name for name, other in ATTACKS.items() if other.live))}"
        )
    full = full_threat(attack, **threat)
    if known.memory is None:
        if not isinstance(victim, Method):
            raise InvalidTypeError(f"victim is {type(victim).__name__}; {attack!r} expects the method that it attacks")
        check_attackable(known, type(victim))
        return Attacker(known, victim, full, seed)
    if not isinstance(victim, nn.Module):
        raise InvalidTypeError(f"victim is {type(victim).__name__}; {attack!r} expects the source model")
    own = copy.deepcopy(victim)
    return Attacker(known, known.memory(own if isinstance(own, Classifier) else Classifier(own), full), full, seed)


def check_attackable(attack: Attack, method: type[Method]) -> None:
    """Refuse an attack through the predictor of a method that answers with more than that."""
    problem = why_unattackable(attack, method)
    if problem is not None:
        raise InvalidValueError(f"{problem}; expected a method such as tent, pl or tsd")


def why_unattackable(attack: Attack, method: type[Method]) -> str | None:
    """Say why an attack is not made on a method; None if it can be."""
    if not attack.live or attack.memory is not None or method.by_predictor:
        return None
    return (
        f"{method.name} answers with more than its predictor (a teacher, prototypes, an average), so an attack through "
        "the predictor would overstate its robustness"
    )


class Attacker:
    """The attacker of one run. Every batch has its own random numbers, so a run that was killed can be resumed.

    Args:
        attack: What it does.
        known: The method that it attacks, or its memory.
        threat: Its budget and its options, all of them.
        seed: Decides all that is random.
    """

    def __init__(self, attack: Attack, known: Method | Memory, threat: Threat, seed: int) -> None:
        self.attack, self.known, self.threat, self.seed = attack, known, threat, seed

    def perturb(self, images: Tensor, labels: Tensor, mine: Tensor, number: int) -> Tensor:
        """Return a batch as it is sent: the attacker's images are changed, the others are as they were.

        Args:
            images: (B,3,H,W), uint8 or floats in [0,1].
            labels: The true classes (B,).
            mine: Which images are the attacker's, (B,) of bool.
            number: The number of the batch in the stream.
        """
        check_labels(labels, images)
        check_mine(mine, labels)
        if not bool(mine.any()):
            return images
        levels = images if images.dtype == torch.uint8 else (images * LEVELS).round().byte()
        made = self._perturb(levels, labels, mine, generator(self.seed, self.attack.name, number)).to(images.device)
        sent = made if images.dtype == torch.uint8 else (made / LEVELS).to(images.dtype)
        return torch.where(mine[:, None, None, None].to(images.device), sent, images)

    def see(self, images: Tensor, labels: Tensor, probs: Tensor) -> None:
        """Take note of the answers to the attacker's own images.

        Args:
            images: The images (M,3,H,W) as they were sent.
            labels: Their true classes (M,).
            probs: The class probabilities (M,K) that came back.
        """
        if not isinstance(self.known, Method) and len(images):
            self.known.see(images, labels, probs)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of all that it remembers, {name: tensor}."""
        return {} if isinstance(self.known, Method) else self.known.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what it remembered."""
        if not isinstance(self.known, Method):
            self.known.load_state_dict(state)

    def _perturb(self, images: Tensor, labels: Tensor, mine: Tensor, randomness: torch.Generator) -> Tensor:
        if not isinstance(self.known, Method):
            return self.attack.perturb(self.known, images, labels, self.threat, randomness, mine)
        device = self.known.classifier.device
        told = (mine.to(device),) if self.attack.poisons or self.attack.adapts else ()
        with self.known.answering():
            victim = self.known if self.attack.adapts else self.known.predictor
            return self.attack.perturb(victim, images.to(device), labels.to(device), self.threat, randomness, *told)


def check_mine(mine: Any, labels: Tensor) -> None:
    """Refuse anything but a bool for each image."""
    if not isinstance(mine, Tensor) or mine.dtype != torch.bool or mine.shape != labels.shape:
        came = f"{mine.dtype} of shape {tuple(mine.shape)}" if isinstance(mine, Tensor) else type(mine).__name__
        raise InvalidTypeError(f"mine is {came}; expected a bool for each of the {len(labels)} images")
