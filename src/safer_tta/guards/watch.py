"""Alarms about a stream that are judged over its last images, so that each is raised once and cleared once.

A share of flagged images is compared with one that is still in order. An alarm is raised if so many flagged images
would hardly ever come by chance, and cleared once they would not be unusual. Between the two it stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..predictors import Prediction

JUDGED = 256  # images
RAISED = 1e-6  # the probability, for a stream that is in order, below which an alarm is raised
CLEARED = 0.05  # and above which it is cleared


@dataclass(frozen=True)
class Kind:
    """An alarm that a watch can raise.

    Attributes:
        in_order: The largest share of flagged images of a stream that is in order.
        raised, cleared: What happened, in words.
        words: What is the case while it is active.
    """

    in_order: float
    raised: str
    cleared: str
    words: str


KINDS = {
    # Clean streams of PACS and of the embedded drawings showed up to 2 %, in bursts.
    "attack": Kind(0.05, "attack suspected", "attack no longer suspected", "{} of the last {} images are suspicious"),
    "abstentions": Kind(
        0.5, "most answers flagged", "most answers no longer flagged", "{} of the last {} answers are flagged"
    ),
}


@dataclass(frozen=True)
class ActiveAlarm:
    """An alarm that was raised and is not cleared yet.

    Attributes:
        kind: "attack", or "abstentions" if more than half of the answers are flagged.
        since: When it was raised, in seconds since 1970.
        batch: The number of the batch after which it was raised, from 1.
        words: What is the case, in words.
    """

    kind: str
    since: float
    batch: int
    words: str


@dataclass
class Watch:
    """What is known of the last images of one stream.

    Attributes:
        flags: Of the last images, by kind of alarm: whether each was flagged.
        abstained: How many answers were flagged since the stream began.
        raised: When the active alarms were raised, and in which batch.
    """

    flags: dict[str, deque[bool]] = field(default_factory=lambda: {kind: deque(maxlen=JUDGED) for kind in KINDS})
    abstained: int = 0
    raised: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def suspicious(self) -> float | None:
        """The share of suspicious images among the last ones; None if there are none whose suspicion is known."""
        seen = self.flags["attack"]
        return sum(seen) / len(seen) if seen else None

    @property
    def active(self) -> tuple[ActiveAlarm, ...]:
        """The alarms that are active, the oldest first."""
        alarms = [ActiveAlarm(kind, since, batch, self._words(kind)) for kind, (since, batch) in self.raised.items()]
        return tuple(sorted(alarms, key=lambda alarm: alarm.batch))

    def see(self, prediction: Prediction, threshold: float, *, now: float, batch: int) -> tuple[str, ...]:
        """Judge the stream with a batch more, and return in words which alarms are raised or cleared now."""
        suspicious, flagged = flags(prediction, threshold)
        self.flags["attack"].extend([] if suspicious is None else suspicious.tolist())
        self.flags["abstentions"].extend(flagged.tolist())
        self.abstained += int(flagged.sum())
        return tuple(words for kind in KINDS if (words := self._judge(kind, now, batch)))

    def _words(self, kind: str) -> str:
        seen = self.flags[kind]
        return f"{KINDS[kind].raised.capitalize()}: {KINDS[kind].words.format(sum(seen), len(seen))}"

    def _judge(self, kind: str, now: float, batch: int) -> str:
        seen = self.flags[kind]
        by_chance = chance(sum(seen), len(seen), KINDS[kind].in_order)
        if kind not in self.raised and by_chance < RAISED:
            self.raised[kind] = (now, batch)
            return KINDS[kind].raised
        if kind in self.raised and by_chance > CLEARED:
            del self.raised[kind]
            return KINDS[kind].cleared
        return ""

    def describe(self) -> dict[str, Any]:
        """Return what users see of it, for JSON."""
        alarms = [asdict(alarm) for alarm in self.active]
        return {"suspicious": self.suspicious, "abstained": self.abstained, "alarms": alarms}

    def pack(self) -> dict[str, Any]:
        """Return it for JSON."""
        seen = {kind: "".join("01"[flag] for flag in them) for kind, them in self.flags.items()}
        return {"flags": seen, "abstained": self.abstained, "raised": self.raised}

    @classmethod
    def unpack(cls, packed: Mapping[str, Any] | None) -> Watch:
        """Read what `pack` returned; None gives a watch that has seen nothing."""
        watch = cls()
        if packed is not None:
            for kind, seen in packed["flags"].items():
                watch.flags[kind].extend(flag == "1" for flag in seen)
            watch.abstained = packed["abstained"]
            watch.raised = {kind: (since, batch) for kind, (since, batch) in packed["raised"].items()}
        return watch


def flags(prediction: Prediction, threshold: float | None) -> tuple[Tensor | None, Tensor]:
    """Return which images (B,) are suspicious, None if that is not known, and whose answers are flagged.

    An answer is flagged if its image is suspicious or if it is not finite. So is a suspicion that is not a number.
    """
    broken = ~torch.isfinite(prediction.probs).all(dim=1).cpu()
    if prediction.suspicion is None or threshold is None:
        return None, broken
    suspicious = ~(prediction.suspicion <= threshold).cpu()
    return suspicious, suspicious | broken


@functools.cache
def chance(flagged: int, images: int, share: float) -> float:
    """Return how probable it is that at least so many images are flagged, if each is with a probability of `share`."""
    terms = (math.comb(images, n) * share**n * (1 - share) ** (images - n) for n in range(flagged, images + 1))
    return math.fsum(terms)
