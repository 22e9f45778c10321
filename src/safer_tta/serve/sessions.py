"""The engine: one method in memory, lent to one stream at a time by one thread.

A stream's state goes in before its batch and comes out after it, on disk before anybody is told. Everything that
touches the method waits in one queue, which has an end.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..guards import Guard
from ..methods import Method
from ..methods.state import GENERATOR
from ..predictors import Prediction
from ..seeds import generator
from .images import Pictures
from .journal import Journal, Json, Stream
from .limits import Limits, Refused
from .metrics import Metrics

log = logging.getLogger("safer_tta.serve")

BINS = 10  # of the suspicion histogram
ALARMS = {
    "rollbacks": "rollback", "collapses": "collapse", "non_finite_weights": "weights not finite",
    "non_finite_answers": "answer not finite", "non_finite_losses": "loss not finite",
    "non_finite_gradients": "gradient not finite",
}  # fmt: skip
UNLEARNT = ("skipped_updates", "non_finite_losses", "non_finite_gradients")


@dataclass(frozen=True)
class Served:
    """What is served: a version that changes with the model and everything that decides its answers."""

    version: str
    method: str
    predictor: str
    classes: tuple[str, ...]
    side: int
    views: int
    abstain: float


@dataclass(frozen=True)
class Job:
    stream: str
    work: Callable[[], Any]
    future: Future[Any]


class Engine:
    """seed: decides every stream's draws, for replays; None draws a secret one for each, which nobody can guess."""

    def __init__(
        self,
        method: Method,
        served: Served,
        journal: Journal,
        *,
        limits: Limits,
        metrics: Metrics,
        seed: int | None = None,
        seconds: float | None = None,
    ) -> None:
        # No anchor images: they would weigh more than all else that is kept of a stream.
        self.guard = Guard(method, least_agreement=0, seconds=seconds)
        self.method, self.served, self.journal = method, served, journal
        self.limits, self.metrics, self.seed = limits, metrics, seed
        self.state_bytes = adapted_bytes(method)
        if self.state_bytes > limits.memory_bytes:
            raise ValueError(
                f"a stream of {method.name} takes {self.state_bytes} bytes and {limits.memory_bytes} are allowed for "
                "all of them. Allow more memory, or serve a method that adapts less, such as tent"
            )
        self._fresh = method.state_dict()
        self._hot: OrderedDict[str, Stream] = OrderedDict()
        self._resident = ""  # whose state is in the method
        self._jobs: queue.Queue[Job | None] = queue.Queue(limits.queue)
        self._waiting: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._listeners: dict[str, set[Callable[[Json], object]]] = {}
        self._pace = 0.1  # seconds a job takes, for those who are told to come back
        self.running = True
        self._thread = threading.Thread(target=self._run, name="safer-tta engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------

    def submit(self, stream: str, work: Callable[[], Any]) -> Future[Any]:
        """Put work for a stream into the queue, or refuse it."""
        if not self.running:
            raise Refused(503, "the service is stopping; try again later", retry_after=5)
        future: Future[Any] = Future()
        with self._lock:
            if self._waiting[stream] >= self.limits.stream_queue:
                raise self._full(f"{self._waiting[stream]} batches of this stream are waiting already")
            try:
                self._jobs.put_nowait(Job(stream, work, future))
            except queue.Full:
                raise self._full("the service has as much to do as it takes on") from None
            self._waiting[stream] += 1
        return future

    def batch(self, stream: str, images: Pictures, key: str | None, content: str) -> Future[tuple[Json, bool]]:
        """(answer, whether it had been given before); content: a hash of the images."""
        return self.submit(stream, lambda: self._answer(stream, images, key, content))

    def create(self, owner: str, name: str) -> Future[None]:
        return self.submit(f"{owner}/{name}", lambda: self._create(owner, name))

    def delete(self, stream: str) -> Future[None]:
        return self.submit(stream, lambda: self._delete(stream))

    def change(self, stream: str, what: str) -> Future[None]:
        """freeze, unfreeze, reset or rollback."""
        return self.submit(stream, lambda: self._change(stream, what))

    def hot(self, stream: str) -> bool:
        return stream in self._hot

    def listen(self, stream: str, listener: Callable[[Json], object]) -> Callable[[], None]:
        """Call with every report of a stream; what is returned ends it."""
        with self._lock:
            self._listeners.setdefault(stream, set()).add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.get(stream, set()).discard(listener)

        return stop

    def stop(self) -> None:
        """Finish what has begun, refuse the rest."""
        self.running = False
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.set_exception(Refused(503, "the service is stopping; try again later", retry_after=5))
        self._jobs.put(None)
        self._thread.join(timeout=60)

    def _full(self, why: str) -> Refused:
        wait = max(1.0, self._jobs.qsize() * self._pace)
        self.metrics.refused.inc()
        return Refused(429, f"{why}; try again in {wait:.0f} s", retry_after=wait)

    # --- on the engine's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():  # else whoever asked is gone
                    self._carry_out(job)
            finally:
                with self._lock:
                    self._waiting[job.stream] -= 1
                    if not self._waiting[job.stream]:
                        del self._waiting[job.stream]
                self.metrics.queue.set(self._jobs.qsize())

    def _carry_out(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            result = job.work()
        except Refused as error:
            job.future.set_exception(error)
        except BaseException as error:
            # Half-changed tensors are thrown away; what is on disk is whole.
            self._hot.pop(job.stream, None)
            self._resident = ""
            log.exception("work for a stream failed")
            job.future.set_exception(error)
        else:
            self._pace = 0.9 * self._pace + 0.1 * (time.perf_counter() - started)
            job.future.set_result(result)

    def _answer(self, identity: str, images: Pictures, key: str | None, content: str) -> tuple[Json, bool]:
        stream = self._stream(identity)
        stored = None if key is None else self.journal.answer(identity, key)
        if stored is not None:
            if stored[1] != content:
                raise Refused(409, "this Idempotency-Key was used for other images; expected a new key for a new batch")
            return stored[0], True
        self._put_in(stream)
        before, started = stream.memory.counters.copy(), time.perf_counter()
        prediction = self.guard(torch.from_numpy(images), learn=self._waiting[identity] <= self.limits.behind)
        seconds = time.perf_counter() - started
        self._take_out(stream)
        stream.batches += 1
        stream.images += len(images)
        answer = self._described(stream, prediction, before, seconds)
        self.journal.commit(stream, answer, key, content)
        self._make_room()
        self.metrics.count(answer["report"])
        with self._lock:
            listeners = list(self._listeners.get(identity, ()))
        for listener in listeners:
            listener(answer["report"])
        return answer, False

    def _create(self, owner: str, name: str) -> None:
        if self.journal.described(owner, name):
            raise Refused(409, f"there is a stream {name!r} already; expected a new name")
        if (self.journal.count() + 1) * self.state_bytes > self.limits.disk_bytes:
            raise Refused(507, "no room for another stream; delete some that are no longer used")
        seed = secrets.randbits(62) if self.seed is None else generator(self.seed, "stream", owner, name).initial_seed()
        state = {**self._fresh, GENERATOR: torch.Generator().manual_seed(seed).get_state()}
        now = time.time()
        stream = Stream(owner, name, now, now, state, seed)
        self.journal.create(stream)
        self._hot[stream.id] = stream
        self._make_room()

    def _delete(self, identity: str) -> None:
        self.journal.delete(self._stream(identity))
        self._hot.pop(identity, None)
        if self._resident == identity:
            self._resident = ""

    def _change(self, identity: str, what: str) -> None:
        stream = self._stream(identity)
        self._put_in(stream)
        if what in ("freeze", "unfreeze"):
            self.method.frozen = what == "freeze"
        elif what == "rollback":
            self.guard.rollback()
            self.guard.memory.counters["rollbacks"] -= 1  # asked for, so no alarm
        else:
            self.guard.reset()
            self.method.state.generator.manual_seed(stream.seed)
        self._take_out(stream)
        self.journal.change(stream, what)

    def _stream(self, identity: str) -> Stream:
        """A stream, from the disk if it is parked."""
        stream = self._hot.get(identity)
        if stream is None:
            stream = self.journal.load(identity)
            if stream is None:
                raise Refused(404, "there is no such stream")
            device = self.method.classifier.device
            for number, probs in enumerate(stream.memory.recent):
                stream.memory.recent[number] = probs.to(device)
            self._hot[identity] = stream
        self._hot.move_to_end(identity)
        return stream

    def _put_in(self, stream: Stream) -> None:
        if self._resident != stream.id:
            self._resident = ""
            self.method.load_state_dict(stream.state)
            self._resident = stream.id
        self.method.frozen, self.guard.memory = stream.frozen, stream.memory

    def _take_out(self, stream: Stream) -> None:
        stream.state, stream.memory = self.method.state_dict(), self.guard.memory
        stream.frozen, stream.last = self.method.frozen, time.time()

    def _make_room(self) -> None:
        """Park the streams that have been idle longest; on disk they are already."""
        while len(self._hot) > 1 and sum(s.nbytes for s in self._hot.values()) > self.limits.memory_bytes:
            self._hot.popitem(last=False)
        self.metrics.hot.set(len(self._hot))

    def _described(self, stream: Stream, prediction: Prediction, before: Counter[str], seconds: float) -> Json:
        """The answer as the API gives it."""
        report, probs, labels = prediction.report, prediction.probs.float().cpu(), prediction.labels.tolist()
        happened = stream.memory.counters - before
        suspicion = None if report.signal is None else report.signal.float().cpu()
        unsure = ~torch.isfinite(probs).all(dim=1)
        abstain = (unsure if suspicion is None else unsure | ~(suspicion <= self.served.abstain)).tolist()
        adapted = not stream.frozen and not any(happened[name] for name in UNLEARNT)
        shares = torch.bincount(torch.tensor(labels), minlength=probs.shape[1]).double() / len(labels)
        told = {
            "stream": stream.name, "number": stream.batches, "time": stream.last, "images": len(labels),
            "adapted": adapted, "seconds": seconds,
            "reliability": _listed(report.reliability),
            "dropped": _dropped(report.dropped),
            "views": ["original", *(" → ".join(names) for names in report.pipelines)],
            "suspicion": None if suspicion is None else _histogram(suspicion),
            "abstained": sum(abstain), "shares": shares.tolist(), "accuracy": None,
            "alarm": ", ".join(words for name, words in ALARMS.items() if happened[name]),
            "health": dict(stream.memory.counters),
        }  # fmt: skip
        return {
            "stream": stream.name, "number": stream.batches, "labels": labels,
            "classes": [self.served.classes[label] for label in labels], "probabilities": _listed(probs),
            "suspicion": _listed(suspicion), "abstain": abstain,
            "weights": _listed(report.weights), "adapted": adapted, "model": self.served.version,
            "report": told,
        }  # fmt: skip


def adapted_bytes(method: Method) -> int:
    """What a stream of this method takes once it has learnt: its state, and the optimiser's two numbers for each."""
    learning = sum(p.numel() * p.element_size() for p in method.classifier.model.parameters() if p.requires_grad)
    return method.state_bytes + 2 * learning


def _listed(tensor: Tensor | None) -> Any:
    """As JSON has it, which knows no NaN: null in its place."""
    if tensor is None:
        return None
    values, finite = tensor.float().cpu(), bool(torch.isfinite(tensor).all())
    return values.tolist() if finite else _without_nan(values.tolist())


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value if math.isfinite(value) else None


def _dropped(view: Tensor | None) -> int | None:
    return None if view is None or int(view) < 0 else int(view)


def _histogram(suspicion: Tensor) -> Json:
    finite = torch.nan_to_num(suspicion, nan=1.0).clamp(0, 1)
    return {"mean": float(finite.mean()), "histogram": torch.histc(finite, BINS, 0, 1).long().tolist()}
