"""One health layer around any method: what is not finite never reaches the weights, and collapse is found and undone.

guarded = Guard(safer_tta.adapt(model), policy="rollback")
prediction = guarded(images)        # as the method itself; prediction.report.health has the counters
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor

from .anchor import Anchor
from .methods import Method
from .methods.state import Snapshot
from .pooling import entropy
from .predictors import Prediction

log = logging.getLogger("safer_tta")

POLICIES = ("warn", "freeze", "reset", "rollback")
COUNTERS = (
    "batches",
    "collapses",
    "rollbacks",
    "drifted_snapshots",
    "periodic_resets",
    "skipped_updates",
    "non_finite_answers",
    "non_finite_losses",
    "non_finite_gradients",
    "non_finite_weights",
)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Memory:
    """What a guard knows of a stream. A method lent to several streams in turn has one guard and each one's memory."""

    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))
    anchor: Anchor = field(default_factory=Anchor)
    behind: float = 0.0  # seconds
    since_reset: int = 0
    judged: int = 0  # batches with an answer that can be judged
    recent: deque[Tensor] = field(default_factory=deque)  # probabilities
    healthy: list[tuple[int, Snapshot]] = field(default_factory=list)
    # A state counts as healthy once a whole window after it was: at first nobody can tell.
    pending: deque[tuple[int, Snapshot]] = field(default_factory=deque)


def _alone(function: Callable[Concatenate[Guard, P], T]) -> Callable[Concatenate[Guard, P], T]:
    """With the method to itself: a guard may be shared by threads as a method may."""

    @functools.wraps(function)
    def run(self: Guard, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        with self.method.to_myself():
            return function(self, *arguments, **keywords)

    return cast(Callable[Concatenate["Guard", P], T], run)


class Guard:
    """A method under watch. Anything else that a method can do goes through to it.

    policy: what to do about a collapse: "warn", "freeze" (roll back, then predict only), "reset" (to the very start),
        "rollback" (to the last snapshot from before things went wrong).
    window, least_images: collapse is judged over so many batches, and at least so many images. It is one if the mean
        prediction's entropy falls below `least_entropy` of ln K, or one class takes more than `largest_share` of the
        answers; an answer that is not finite, to images that are, is one at once.
    reset_every: put weights, optimiser and memories back after so many batches.
    seconds: time allowed per batch. When behind, batches are answered without learning until it has caught up.
    snapshots, snapshot_every: how many healthy states to remember, and how many batches apart. Older ones lie
        further and further apart, so that some remain from before a slow poisoning.
    least_agreement: a rollback passes over states that no longer answer this share of the stream's first images (up
        to 128, `Anchor`) as the method did at its start: learning from garbage shows there, but so does much honest
        learning, and then a rollback goes further back than it need have. 0 looks at no images. It costs a forward
        pass per rollback, and nothing while all is well.
    """

    def __init__(
        self,
        method: Method,
        *,
        policy: str = "rollback",
        window: int = 8,
        least_images: int = 64,
        least_entropy: float = 0.3,
        largest_share: float = 0.9,
        reset_every: int | None = None,
        seconds: float | None = None,
        snapshots: int = 4,
        snapshot_every: int = 8,
        least_agreement: float = 0.99,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(method, Method):
            raise TypeError(f"method is {type(method).__name__}; expected one of this library's, as adapt() makes them")
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is unknown; expected one of {', '.join(POLICIES)}")
        counts = {"window": window, "least_images": least_images, "snapshots": snapshots}
        counts |= {"snapshot_every": snapshot_every, "reset_every": 1 if reset_every is None else reset_every}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.method, self.policy = method, policy
        self.window, self.least_images = window, least_images
        self.least_entropy, self.largest_share = least_entropy, largest_share
        self.reset_every, self.seconds, self.snapshot_every, self.clock = reset_every, seconds, snapshot_every, clock
        self.least_agreement, self.snapshots = least_agreement, snapshots
        self.memory = Memory()
        method.watched = True

    def _start_over(self) -> None:
        """Forget the stream so far: what came before a reset or a load says nothing about what comes after."""
        self.memory = Memory(counters=self.memory.counters)

    @property
    def counters(self) -> Counter[str]:
        return self.memory.counters

    # --- as the method ------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "method":  # not built yet
            raise AttributeError(name)
        return getattr(self.method, name)

    @property
    def frozen(self) -> bool:
        return self.method.frozen

    def freeze(self) -> Self:
        self.method.freeze()
        return self

    def unfreeze(self) -> Self:
        self.method.unfreeze()
        return self

    def to(self, device: torch.device | str) -> Self:
        self.method.to(device)
        return self

    @_alone
    def reset(self) -> None:
        self.method.reset()
        self._start_over()

    @_alone
    def restore(self) -> None:
        self.method.restore()
        self._start_over()

    @_alone
    def load(self, path: str | os.PathLike[str]) -> Guard:
        self.method.load(path)
        self._start_over()
        return self

    @_alone
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        self.method.load_state_dict(snapshot)
        self._start_over()

    def stream(self, batches: Iterable[Any], *, prefetch: bool = False) -> Iterator[Prediction]:
        """As a method's. prefetch changes nothing: a guard looks at every answer before the next batch."""
        for batch in batches:
            yield self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    @_alone
    def __call__(self, images: Tensor, *, learn: bool = True) -> Prediction:
        """Predict and learn, if that is healthy; predict in any case. learn=False answers as when behind."""
        started = self.clock()
        prediction = self._adapt(images, learn)
        self.memory.counters["batches"] += 1
        self.memory.since_reset += 1
        broken = not bool(torch.isfinite(prediction.probs).all())
        if broken:
            self.memory.counters["non_finite_answers"] += 1
        else:
            self._note(images, prediction.probs)
        self._look_after(broken and bool(torch.isfinite(images).all()))
        if self.seconds is not None:
            self.memory.behind = max(0.0, self.memory.behind + self.clock() - started - self.seconds)
        health = dict(self.memory.counters)
        return dataclasses.replace(prediction, report=dataclasses.replace(prediction.report, health=health))

    @_alone
    def rollback(self) -> None:
        """Back to the last healthy snapshot that still knows the stream's first images; asked again, to one before
        it; in the end to the start. The generator runs on."""
        while self.memory.healthy:
            self.method.state.load(self.memory.healthy.pop()[1], generator=False)
            if self.least_agreement <= 0 or self.memory.anchor.agreement(self.method) >= self.least_agreement:
                break
            self.memory.counters["drifted_snapshots"] += 1
        else:
            self.method.restore()
        self._forget()
        self.memory.counters["rollbacks"] += 1

    # --- the watch ----------------------------------------------------------------------------------------------

    def _adapt(self, images: Tensor, learn: bool) -> Prediction:
        if (self.memory.behind > 0 or not learn) and not self.method.frozen:
            self.memory.counters["skipped_updates"] += 1
            return self._predict_only(images)
        before = self.method.refused.copy()
        prediction = self.method(images)
        for kind in ("losses", "gradients"):
            self.memory.counters[f"non_finite_{kind}"] += self.method.refused[kind] - before[kind]
        if not self.method.state.finite():
            log.warning("%s: a step left weights that are not finite; rolled back", self.method.name)
            self.memory.counters["non_finite_weights"] += 1
            self.rollback()
        return prediction

    def _predict_only(self, images: Tensor) -> Prediction:
        """As a frozen method would: fresh views, nothing learnt."""
        frozen = self.method.frozen
        self.method.freeze()
        try:
            return self.method(images)
        finally:
            self.method.frozen = frozen

    def _note(self, images: Tensor, probs: Tensor) -> None:
        self.memory.judged += 1
        if self.least_agreement > 0 and self.memory.judged <= self.window:
            self.memory.anchor.offer(images)
        self.memory.recent.append(probs.cpu())  # wherever the method goes later
        while len(self.memory.recent) > self.window and self._seen() - len(self.memory.recent[0]) >= self.least_images:
            self.memory.recent.popleft()

    def _seen(self) -> int:
        return sum(len(probs) for probs in self.memory.recent)

    def _look_after(self, broken: bool) -> None:
        if not self.method.frozen and (broken or self._collapsed()):
            self.memory.counters["collapses"] += 1
            self._answer_collapse()
        elif self.reset_every is not None and self.memory.since_reset % self.reset_every == 0:
            self.method.restore()
            self.memory.counters["periodic_resets"] += 1
            self.memory.healthy.clear()
            self._forget()
        else:
            self._remember()

    def _remember(self) -> None:
        while self.memory.pending and self.memory.judged - self.memory.pending[0][0] >= self.window:
            self.memory.healthy.append(self.memory.pending.popleft())
            self._thin()
        if self.memory.judged and self.memory.judged % self.snapshot_every == 0 and not self._taken(self.memory.judged):
            self.memory.pending.append((self.memory.judged, self.method.state_dict()))

    def _taken(self, when: int) -> bool:
        """A batch that could not be judged does not move the clock."""
        return bool(self.memory.pending) and self.memory.pending[-1][0] == when

    def _thin(self) -> None:
        """Give up the snapshot whose neighbours lie closest for its age; never the newest."""
        if len(self.memory.healthy) > self.snapshots:
            taken = [0, *(when for when, _ in self.memory.healthy)]
            gaps = [(taken[i + 1] - taken[i - 1]) / (self.memory.judged - taken[i]) for i in range(1, len(taken) - 1)]
            del self.memory.healthy[gaps.index(min(gaps))]

    def _forget(self) -> None:
        self.memory.recent.clear()
        self.memory.pending.clear()

    def _collapsed(self) -> bool:
        if len(self.memory.recent) < self.window or self._seen() < self.least_images:
            return False
        probs = torch.cat(list(self.memory.recent))
        classes = probs.shape[1]
        if classes == 1:
            return False
        mean = probs.mean(dim=0)
        spread = float(entropy(mean)) / math.log(classes)
        share = float(torch.bincount(probs.argmax(dim=1), minlength=classes).max()) / len(probs)
        return spread < self.least_entropy or share > self.largest_share

    def _answer_collapse(self) -> None:
        log.warning("%s: its answers have collapsed (policy %s)", self.method.name, self.policy)
        if self.policy == "reset":
            self.method.reset()
            self.memory.healthy.clear()
        elif self.policy in ("rollback", "freeze"):
            self.rollback()
        if self.policy == "freeze":
            self.method.freeze()
        self._forget()
