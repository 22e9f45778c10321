"""A health layer around any method: non-finite numbers never reach the weights, and collapse is found and undone.

guarded = Guard(safer_tta.adapt(model), policy="rollback")
prediction = guarded(images)        # as the method itself; prediction.report.health has the counters
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from .._internal.checks import count, one_of, positive, share
from .._internal.locking import exclusive
from .._internal.progress import counted, length
from .._internal.temporary import temporarily
from ..errors import InvalidTypeError
from ..evaluation import Evaluation, evaluate
from ..methods import Method, Snapshot, Taken
from ..models.norm import use_batch
from ..predictors import Prediction, take_images
from .alarm import Alarm, troubles
from .collapse import collapsed, concentrated
from .memory import Memory
from .watch import ActiveAlarm

log = logging.getLogger("safer_tta")

ADVICE = "; statistics of the batch mislead on such a stream, norm 'stream' allows for it"
POLICIES = ("warn", "freeze", "reset", "rollback")


@dataclass(eq=False, repr=False)
class Guard:
    """Watches a method while it adapts, and undoes what went wrong. It offers everything that the method does.

    Collapse is judged over the last `window` batches, and over at least `least_images` images. A stream has collapsed
    if the entropy of the mean prediction falls below `least_entropy` of ln K, or if one class takes more than
    `largest_share` of the answers. A non-finite answer to finite images is a collapse at once.
    The guard also counts as `concentrated` each batch after which the last 64 answers name very few classes, as when
    one class comes after the other. It warns once, and changes nothing.

    Args:
        method: What `safer_tta.adapt` returned.
        policy: What to do about a collapse: "warn" only, "freeze" (roll back, then only predict), "reset" (to the very
            start) or "rollback" (to the last snapshot from before things went wrong).
        window: How many batches are judged together.
        least_images: How many images are judged together at least.
        least_entropy: The smallest healthy entropy, as a share of ln K.
        largest_share: The largest healthy share of one class.
        reset_every: Restore weights, optimiser and memories after so many batches. None never does.
        seconds: Time allowed per batch. While the method is behind, it answers without learning. None sets no limit.
        snapshots: How many healthy states are kept, older ones further and further apart: some predate slow poisoning.
        snapshot_every: How many batches lie between two snapshots.
        least_agreement: A rollback skips states that answer less than this share of the stream's first images (up to
            128) as the method did at its start. Much honest learning shows there too; then a rollback goes further
            back than necessary. It costs a forward pass per rollback; 0 keeps no images.
        clock: Returns the time in seconds.
        abstain: The suspicion above which an image counts as flagged for `alarms`.
        on_alarm: Called with an `Alarm` after each batch in which something went wrong and the guard has dealt with it,
            or in which one of `alarms` was raised or cleared. It may use the guard. What it raises reaches the caller.

    Attributes:
        memory: What it knows of the stream that it watches.

    Raises:
        InvalidTypeError: If the method is not one of this library's, or an option has the wrong type.
        InvalidValueError: If an option is out of range.
    """

    method: Method
    _: KW_ONLY
    policy: str = "rollback"
    window: int = 8
    least_images: int = 64
    least_entropy: float = 0.3
    largest_share: float = 0.9
    reset_every: int | None = None
    seconds: float | None = None
    snapshots: int = 4
    snapshot_every: int = 8
    least_agreement: float = 0.99
    clock: Callable[[], float] = time.monotonic
    abstain: float = 0.5
    on_alarm: Callable[[Alarm], object] | None = None
    memory: Memory = field(init=False, default_factory=Memory)
    _apart: Snapshot | None = field(init=False, default=None)  # the state of the stream while the method has another

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise InvalidTypeError(f"method is {type(self.method).__name__}; expected what safer_tta.adapt() returns")
        one_of(POLICIES, policy=self.policy)
        count(window=self.window, least_images=self.least_images)
        count(snapshots=self.snapshots, snapshot_every=self.snapshot_every)
        share(least_entropy=self.least_entropy, largest_share=self.largest_share, least_agreement=self.least_agreement)
        share(abstain=self.abstain)
        if self.reset_every is not None:
            count(reset_every=self.reset_every)
        if self.seconds is not None:
            positive(seconds=self.seconds)
        if self.on_alarm is not None and not callable(self.on_alarm):
            raise InvalidTypeError(f"on_alarm is {self.on_alarm!r}; expected a function that takes an Alarm, or None")
        self.method.watched = True

    @property
    def counters(self) -> Counter[str]:
        """What has happened so far, by the names in `COUNTERS`."""
        return self.memory.counters

    @property
    def alarms(self) -> tuple[ActiveAlarm, ...]:
        """What is wrong with the last images of the stream: alarms that were raised and are not cleared yet."""
        return self.memory.watch.active

    # --- as the method ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        given = [f for f in dataclasses.fields(self) if f.init and f.default is not dataclasses.MISSING]
        changed = [f.name for f in given if f.name == "policy" or getattr(self, f.name) != f.default]
        return f"Guard({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})\n{self.method!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "method":  # not built yet
            raise AttributeError(name)
        return getattr(self.method, name)

    def exclusively(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no other thread uses the method."""
        return self.method.exclusively()

    @property
    def frozen(self) -> bool:
        """Whether the method only predicts."""
        return self.method.frozen

    def freeze(self) -> Self:
        """Only predict from now on."""
        self.method.freeze()
        return self

    def unfreeze(self) -> Self:
        """Learn again from now on."""
        self.method.unfreeze()
        return self

    def to(self, device: torch.device | str) -> Self:
        """Move the model and the state to a device."""
        self.method.to(device)
        return self

    @exclusive
    def reset(self, *, seed: int | None = None) -> None:
        """Return to the very start, generator included; with a seed, the generator starts from that."""
        self.method.reset()
        if seed is not None:
            self.method.state.generator.manual_seed(seed)
        self._start_over()

    @exclusive
    def restore(self) -> None:
        """Return weights, optimiser and memories to the start; the generator continues."""
        self.method.restore()
        self._start_over()

    @exclusive
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Continue from a saved state, bit for bit, with the same source model and options."""
        self.method.load(path)
        self._start_over()
        return self

    @exclusive
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        """Continue from a state; one that does not fit is refused and changes nothing."""
        self.method.load_state_dict(snapshot)
        self._start_over()

    def evaluate(self, loader: Iterable[Any], *, key: str | None = None) -> Evaluation:
        """Adapt over batches of (images, labels) or (images, labels, attacked), and return the scores as a table."""
        return evaluate(self, loader, key=key)

    def stream(
        self, batches: Iterable[Any], *, prefetch: bool = False, key: str | None = None, progress: bool = False
    ) -> Iterator[Prediction]:
        """Adapt over many batches, as `Method.stream` does.

        `prefetch` changes nothing: every answer is checked before the next batch.
        """
        answers = map(self, (take_images(batch, key) for batch in batches))
        return counted(answers, self.method.name, length(batches)) if progress else answers

    @exclusive
    def __call__(self, images: Tensor, *, learn: bool = True) -> Prediction:
        """Predict a batch, then learn from it if that is healthy.

        Args:
            images: (B,3,H,W), floats in [0,1] or uint8.
            learn: Whether it may learn. False answers as when it is behind its time.
        """
        started, before = self.clock(), self.counters.copy()
        prediction = self._adapt(images, learn)
        self._judge(images, prediction)
        self._keep_time(self.clock() - started)
        return self._told(prediction, before)

    @exclusive
    def adopt(
        self, memory: Memory, images: Tensor, taken: Taken, *, frozen: bool, learn: bool, seconds: float
    ) -> Prediction:
        """Judge what a step for several streams gave one of them, as if the method had answered by itself.

        `lent_state()` is the state of the stream afterwards.

        Args:
            memory: What was known of the stream.
            images: Its batch.
            taken: Its answer and its state.
            frozen: Whether it only predicts.
            learn: Whether it was to learn, if it is not frozen.
            seconds: Its share of the time.
        """
        self.lend(memory, frozen=frozen)
        self._apart, before = taken.state, self.counters.copy()
        if taken.refused:
            self.counters[f"non_finite_{taken.refused}"] += 1
        if not (learn or frozen):
            self.counters["skipped_updates"] += 1
        elif not taken.finite:
            self._undo_step()
        self._judge(images, taken.prediction)
        self._keep_time(seconds)
        return self._told(taken.prediction, before)

    # --- a guard's own ------------------------------------------------------------------------------------------

    @exclusive
    def rollback(self, *, counted: bool = True) -> None:
        """Return to the last healthy snapshot that still knows the stream's first images. The generator continues.

        Another call returns to the snapshot before it, and in the end to the start.

        Args:
            counted: Whether this counts among the rollbacks. One that was asked for is not a sign of trouble.
        """
        while self.memory.healthy:
            self._holding().state.load(self.memory.healthy.pop()[1], generator=False)
            if self.least_agreement <= 0 or self.memory.anchor.agreement(self.method) >= self.least_agreement:
                break
            self.counters["drifted_snapshots"] += 1
        else:
            self._holding().restore()
        self._forget()
        self.counters["rollbacks"] += counted

    @exclusive
    def lend(self, memory: Memory, *, frozen: bool = False, state: Mapping[str, Tensor] | None = None) -> None:
        """Watch another stream from now on, with what was known of it; the method is in its state if none is given."""
        if state is not None:
            self.method.load_state_dict(state)
        self.memory, self._apart = memory, None
        if frozen:
            self.method.freeze()
        else:
            self.method.unfreeze()

    def lent_state(self) -> Snapshot:
        """Return the state of the stream that is watched now."""
        return self.method.state_dict() if self._apart is None else self._apart

    # --- the watch ----------------------------------------------------------------------------------------------

    def _holding(self) -> Method:
        """Return the method with the state of the stream in it, to change that."""
        if self._apart is not None:
            self.method.load_state_dict(self._apart)
            self._apart = None
        return self.method

    def _start_over(self) -> None:
        """Forget the stream so far: what came before a reset or a load says nothing about what comes after."""
        self.memory = Memory(counters=self.counters, watch=self.memory.watch)  # images are judged, not the state

    def _adapt(self, images: Tensor, learn: bool) -> Prediction:
        if (self.memory.behind > 0 or not learn) and not self.method.frozen:
            self.counters["skipped_updates"] += 1
            with temporarily([self.method], frozen=True):  # it answers with fresh views and learns nothing
                return self.method(images)
        before = self.method.refused.copy()
        prediction = self.method(images)
        for kind in ("losses", "gradients"):
            self.counters[f"non_finite_{kind}"] += self.method.refused[kind] - before[kind]
        if not self.method.state.finite():
            self._undo_step()
        return prediction

    def _undo_step(self) -> None:
        log.warning("%s: a step left weights that are not finite; rolled back", self.method.name)
        self.counters["non_finite_weights"] += 1
        self.rollback()

    def _judge(self, images: Tensor, prediction: Prediction) -> None:
        self.counters["batches"] += 1
        self.memory.since_reset += 1
        broken = not bool(torch.isfinite(prediction.probs).all())
        if broken:
            self.counters["non_finite_answers"] += 1
        else:
            self._note(images, prediction.probs)
        self._look_after(broken and bool(torch.isfinite(images).all()))

    def _keep_time(self, taken: float) -> None:
        if self.seconds is not None:
            self.memory.behind = max(0.0, self.memory.behind + taken - self.seconds)

    def _told(self, prediction: Prediction, before: Counter[str]) -> Prediction:
        """Raise an alarm if something is wrong with this batch or the last images; return the answer with counters."""
        batch = self.counters["batches"]
        changes = self.memory.watch.see(prediction, self.abstain, now=time.time(), batch=batch)
        what = (*troubles(before, self.counters), *changes)
        if what and self.on_alarm is not None:
            self.on_alarm(Alarm(what, batch, self.policy, dict(self.counters), self.alarms))
        report = dataclasses.replace(prediction.report, health=dict(self.counters))
        return dataclasses.replace(prediction, report=report)

    def _note(self, images: Tensor, probs: Tensor) -> None:
        memory = self.memory
        memory.judged += 1
        if self.least_agreement > 0 and memory.judged <= self.window:
            memory.anchor.offer(images)
        memory.recent.append(probs.cpu())  # the method may move to another device later
        while len(memory.recent) > self.window and self._seen() - len(memory.recent[0]) >= self.least_images:
            memory.recent.popleft()
        memory.last.extend(probs.argmax(dim=1).tolist())
        if concentrated(memory.last, probs.shape[1]):
            if not self.counters["concentrated"]:
                advice = ADVICE if use_batch(self.method.classifier.norms()) else ""
                log.warning("%s: the last answers name few classes%s", self.method.name, advice)
            self.counters["concentrated"] += 1

    def _seen(self) -> int:
        return sum(len(probs) for probs in self.memory.recent)

    def _look_after(self, broken: bool) -> None:
        if not self.method.frozen and (broken or self._collapsed()):
            self.counters["collapses"] += 1
            self._answer_collapse()
        elif self.reset_every is not None and self.memory.since_reset % self.reset_every == 0:
            self._holding().restore()
            self.counters["periodic_resets"] += 1
            self.memory.healthy.clear()
            self._forget()
        else:
            self._remember()

    def _remember(self) -> None:
        memory = self.memory
        while memory.pending and memory.judged - memory.pending[0][0] >= self.window:
            memory.healthy.append(memory.pending.popleft())
            self._thin()
        # A batch that could not be judged does not move the clock: its state was taken already.
        taken = bool(memory.pending) and memory.pending[-1][0] == memory.judged
        if memory.judged and memory.judged % self.snapshot_every == 0 and not taken:
            memory.pending.append((memory.judged, self.lent_state()))

    def _thin(self) -> None:
        """Drop the snapshot whose neighbours lie closest for its age; never the newest."""
        if len(self.memory.healthy) > self.snapshots:
            taken = [0, *(when for when, _ in self.memory.healthy)]
            gaps = [(taken[i + 1] - taken[i - 1]) / (self.memory.judged - taken[i]) for i in range(1, len(taken) - 1)]
            del self.memory.healthy[gaps.index(min(gaps))]

    def _forget(self) -> None:
        self.memory.recent.clear()
        self.memory.pending.clear()

    def _collapsed(self) -> bool:
        recent = self.memory.recent
        if len(recent) < self.window or self._seen() < self.least_images:
            return False
        return collapsed(recent, least_entropy=self.least_entropy, largest_share=self.largest_share)

    def _answer_collapse(self) -> None:
        log.warning("%s: its answers have collapsed (policy %s)", self.method.name, self.policy)
        if self.policy == "reset":
            self._holding().reset()
            self.memory.healthy.clear()
        elif self.policy in ("rollback", "freeze"):
            self.rollback()
        if self.policy == "freeze":
            self.method.freeze()
        self._forget()
