"""One health layer around any method: what is not finite never reaches the weights, and collapse is found and undone.

guarded = Guard(safer_tta.adapt(model), policy="rollback")
prediction = guarded(images)        # as the method itself; prediction.report.health has the counters
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .anchor import Anchor
from .methods import Method
from .methods.state import Snapshot
from .predictors import Prediction

log = logging.getLogger("safer_tta")

POLICIES = ("warn", "freeze", "reset", "rollback")


class NotFiniteError(RuntimeError):
    """A gradient that is not finite, found before the optimiser could use it."""


class Guard:
    """A method under watch. Anything else that a method can do goes through to it.

    policy: what to do about a collapse: "warn", "freeze" (predict only from then on), "reset" (to the very start),
        "rollback" (to the last snapshot from before things went wrong).
    window: batches over which collapse is judged. It is one if the mean prediction's entropy falls below
        `least_entropy` of ln K, or one class takes more than `largest_share` of the answers.
    reset_every: put weights, optimiser and memories back after so many batches.
    seconds: time allowed per batch. When behind, batches are answered without learning until it has caught up.
    snapshots, snapshot_every: how many healthy states to remember, and how many batches apart. Older ones lie
        further and further apart, so that some remain from before a slow poisoning.
    least_agreement: a rollback passes over states that no longer answer this share of the stream's first images (up
        to 128, `Anchor`) as they were answered: learning from garbage shows there, but so does much honest learning,
        and then a rollback goes further back than it need have. 0 looks at no images. A forward pass per rollback.
    """

    def __init__(
        self,
        method: Method,
        *,
        policy: str = "rollback",
        window: int = 8,
        least_entropy: float = 0.3,
        largest_share: float = 0.9,
        reset_every: int | None = None,
        seconds: float | None = None,
        snapshots: int = 4,
        snapshot_every: int = 8,
        least_agreement: float = 0.99,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is unknown; expected one of {', '.join(POLICIES)}")
        for name, value in (("window", window), ("snapshots", snapshots), ("snapshot_every", snapshot_every)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        self.method, self.policy = method, policy
        self.least_entropy, self.largest_share = least_entropy, largest_share
        self.reset_every, self.seconds, self.snapshot_every, self.clock = reset_every, seconds, snapshot_every, clock
        self.counters: Counter[str] = Counter()
        self.behind = 0.0
        self.recent: deque[Prediction] = deque(maxlen=window)
        self.anchor, self.least_agreement = Anchor(), least_agreement
        self.snapshots = snapshots
        self.healthy: list[tuple[int, Snapshot]] = []
        # A state counts as healthy once a whole window after it was: at first nobody can tell.
        self.pending: deque[tuple[int, Snapshot]] = deque()
        for optimizer in method.state.optimizers.values():
            optimizer.register_step_pre_hook(_refuse_non_finite)

    def __getattr__(self, name: str) -> Any:
        if name == "method":  # not built yet
            raise AttributeError(name)
        return getattr(self.method, name)

    def __call__(self, images: Tensor) -> Prediction:
        """Predict and learn, if that is healthy; predict in any case."""
        started = self.clock()
        prediction = self._adapt(images)
        self.counters["batches"] += 1
        if not bool(torch.isfinite(prediction.probs).all()):
            self.counters["non_finite_answers"] += 1
        else:
            self.recent.append(prediction)
            if self.least_agreement > 0 and self.counters["batches"] <= (self.recent.maxlen or 1):
                self.anchor.offer(images, self.method)
        self._look_after()
        if self.seconds is not None:
            self.behind = max(0.0, self.behind + self.clock() - started - self.seconds)
        return dataclasses.replace(
            prediction, report=dataclasses.replace(prediction.report, health=dict(self.counters))
        )

    def stream(self, batches: Iterable[Any]) -> Iterator[Prediction]:
        for batch in batches:
            yield self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def rollback(self) -> None:
        """Back to the last healthy snapshot that still knows the anchor; asked again, to one before it; in the end to
        the start. The generator runs on."""
        while self.healthy:
            self.method.state.load(self.healthy.pop()[1], generator=False)
            if self.anchor.agreement(self.method) >= self.least_agreement:
                break
            self.counters["drifted_snapshots"] += 1
        else:
            self.method.restore()
        self._forget()
        self.counters["rollbacks"] += 1

    def _adapt(self, images: Tensor) -> Prediction:
        if self.behind > 0 and not self.method.frozen:
            self.counters["skipped_updates"] += 1
            return self._predict_only(images)
        try:
            prediction = self.method(images)
        except NotFiniteError:
            self.counters["non_finite_gradients"] += 1
            return self._predict_only(images)
        if not self._finite():
            log.warning("%s: a step left weights that are not finite; rolled back", self.method.name)
            self.counters["non_finite_weights"] += 1
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

    def _finite(self) -> bool:
        tensors = [t for t in self.method.state_dict().values() if t.is_floating_point()]
        return all(bool(torch.isfinite(t).all()) for t in tensors)

    def _look_after(self) -> None:
        if self.reset_every is not None and self.counters["batches"] % self.reset_every == 0:
            self.method.restore()
            self.counters["periodic_resets"] += 1
            self._forget()
        elif len(self.recent) == self.recent.maxlen and self._collapsed():
            self.counters["collapses"] += 1
            self._answer_collapse()
        else:
            self._remember()

    def _remember(self) -> None:
        now, window = self.counters["batches"], self.recent.maxlen or 1
        while self.pending and now - self.pending[0][0] >= window:
            self.healthy.append(self.pending.popleft())
            self._thin(now)
        if now % self.snapshot_every == 0:
            self.pending.append((now, self.method.state_dict()))

    def _thin(self, now: int) -> None:
        """Give up the snapshot whose neighbours lie closest for its age; never the newest."""
        if len(self.healthy) > self.snapshots:
            taken = [0, *(when for when, _ in self.healthy)]
            gaps = [(taken[i + 1] - taken[i - 1]) / (now - taken[i]) for i in range(1, len(taken) - 1)]
            del self.healthy[gaps.index(min(gaps)) if gaps else 0]

    def _forget(self) -> None:
        self.recent.clear()
        self.pending.clear()

    def _collapsed(self) -> bool:
        probs = torch.cat([p.probs for p in self.recent])
        classes = probs.shape[1]
        if classes == 1:
            return False
        mean = probs.mean(dim=0)
        spread = float(-(mean * mean.clamp_min(1e-12).log()).sum()) / math.log(classes)
        share = float(torch.bincount(probs.argmax(dim=1), minlength=classes).max()) / len(probs)
        return spread < self.least_entropy or share > self.largest_share

    def _answer_collapse(self) -> None:
        log.warning("%s: its answers have collapsed (policy %s)", self.method.name, self.policy)
        if self.policy == "freeze":
            self.method.freeze()
        elif self.policy == "reset":
            self.method.reset()
        elif self.policy == "rollback":
            self.rollback()
        self._forget()


def _refuse_non_finite(optimizer: Optimizer, *_: Any) -> None:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(bool(torch.isfinite(g).all()) for g in gradients):
        optimizer.zero_grad()
        raise NotFiniteError("a gradient is not finite; the step was not taken")
