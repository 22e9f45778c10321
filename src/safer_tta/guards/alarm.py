"""What a guard tells at once: which counters mean trouble, and what is known when one of them rises."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .watch import ActiveAlarm

# The counters that mean trouble, in the words of an alarm.
ALARMS = {
    "rollbacks": "rollback",
    "collapses": "collapse",
    "non_finite_weights": "weights not finite",
    "non_finite_answers": "answer not finite",
    "non_finite_losses": "loss not finite",
    "non_finite_gradients": "gradient not finite",
}


@dataclass(frozen=True)
class Alarm:
    """What happened in one batch.

    Attributes:
        what: What happened, in words: "collapse", "rollback", "answer not finite", "attack suspected", "attack no
            longer suspected" and so on.
        batch: The number of the batch, from 1.
        policy: What the guard does about a collapse.
        health: All counters of the guard after the batch.
        active: The alarms about the stream's last images that are active after the batch.
    """

    what: tuple[str, ...]
    batch: int
    policy: str
    health: Mapping[str, int]
    active: tuple[ActiveAlarm, ...] = ()

    def __str__(self) -> str:
        return f"batch {self.batch}: {', '.join(self.what)} (policy {self.policy})"


def troubles(before: Counter[str], after: Counter[str]) -> tuple[str, ...]:
    """Return in words which of the counters that mean trouble have risen."""
    return tuple(words for name, words in ALARMS.items() if after[name] > before[name])
