"""The engine: one method in memory, lent to one stream at a time by one thread.

A stream's state goes in before its batch and comes out after it, on disk before anybody is told. Everything that
touches the method waits in one queue, which has an end.
"""

from __future__ import annotations

import contextlib
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
from ..methods.state import GENERATOR, learnt
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

Listener = Callable[[Json | None], object]


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
        self._fresh = method.state_dict()
        self._hot: OrderedDict[str, Stream] = OrderedDict()
        self._resident = ""  # whose state is in the method
        self._jobs: queue.Queue[Job | None] = queue.Queue(limits.queue)
        metrics.queue.set_function(self._jobs.qsize)
        self._waiting: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._bytes: dict[str, int] = {}  # of each hot stream
        self._lock = threading.Lock()
        self._listeners: dict[str, set[Listener]] = {}
        self._pace = 0.1  # seconds a job takes, for those who are told to come back
        self.running = True
        self._thread = threading.Thread(target=self._run, name="safer-tta engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------

    def submit(self, stream: str, work: Callable[[], Any]) -> Future[Any]:
        """Put work for a stream into the queue, or refuse it."""
        future: Future[Any] = Future()
        with self._lock:
            self._check_room(stream)
            self._jobs.put_nowait(Job(stream, work, future))
            self._waiting[stream] += 1
            self._owners[stream.partition("/")[0]] += 1
        return future

    def check_room(self, stream: str) -> None:
        """Refuse early: before a body is read and decoded for nothing."""
        with self._lock:
            self._check_room(stream)

    def _check_room(self, stream: str) -> None:
        if not self.running:
            raise _stopping()
        if self._waiting[stream] >= self.limits.stream_queue:
            raise self._full("too many batches of this stream are waiting already")
        if self._owners[stream.partition("/")[0]] >= self.limits.owner_queue:
            raise self._full("too many batches of this owner are waiting already")
        if self._jobs.full():
            raise self._full("the service has as much to do as it takes on")

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

    @property
    def ready(self) -> bool:
        return self.running and self._thread.is_alive()

    def listen(self, stream: str, listener: Listener) -> Callable[[], None]:
        """Call with every report of a stream, and with None when there will be no more; what is returned ends it."""
        owner = f"{stream.partition('/')[0]}/"
        with self._lock:
            if (
                sum(len(heard) for name, heard in self._listeners.items() if name.startswith(owner))
                >= self.limits.feeds
            ):
                raise Refused(429, f"{self.limits.feeds} feeds are open already; close some", retry_after=5)
            self._listeners.setdefault(stream, set()).add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.get(stream, set()).discard(listener)
                if not self._listeners.get(stream):
                    self._listeners.pop(stream, None)

        return stop

    def _tell(self, stream: str, report: Json | None) -> None:
        with self._lock:
            listeners = list(self._listeners.get(stream, ()))
        for listener in listeners:
            try:
                listener(report)
            except Exception:  # whoever listened is gone; the batch is answered all the same
                log.info("a listener is gone", exc_info=True)

    def refuse(self) -> None:
        """From now on take nothing on; what waits is sent away, feeds end. The batch in hand is finished."""
        with self._lock:
            self.running, left = False, []
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._jobs.get_nowait())
            streams = list(self._listeners)
        for job in left:
            if job is not None and job.future.set_running_or_notify_cancel():  # else whoever asked is gone
                job.future.set_exception(_stopping())
        for stream in streams:
            self._tell(stream, None)

    def stop(self) -> None:
        """Refuse, finish, and let go of the folder."""
        self.refuse()
        self._jobs.put(None)
        self._thread.join(timeout=60)
        self.journal.close()

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
                    for counts, name in ((self._waiting, job.stream), (self._owners, job.stream.partition("/")[0])):
                        counts[name] -= 1
                        if counts[name] <= 0:
                            del counts[name]

    def _carry_out(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            result = job.work()
        except Refused as error:
            job.future.set_exception(error)
        except BaseException as error:
            # Half-changed tensors are thrown away; what is on disk is whole.
            self._forget(job.stream)
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
        counters, state, started = stream.memory.counters.copy(), stream.state, time.perf_counter()
        try:
            prediction = self.guard(torch.from_numpy(images), learn=self._waiting[identity] <= self.limits.behind)
        except ValueError as error:  # the method takes no such batch
            self._forget(identity)  # whatever it got to: what is on disk is whole
            log.info("a batch was refused", exc_info=True)
            raise Refused(422, str(error)) from error
        seconds = time.perf_counter() - started
        self._take_out(stream)
        stream.batches += 1
        stream.images += len(images)
        answer = self._described(stream, prediction, counters, seconds, adapted=learnt(state, stream.state))
        self.journal.commit(stream, answer, key, content)
        self._make_room(stream)
        self.metrics.count(answer["report"])
        self._tell(identity, answer["report"])
        return answer, False

    def _create(self, owner: str, name: str) -> None:
        if self.journal.exists(f"{owner}/{name}"):
            raise Refused(409, f"there is a stream {name!r} already; expected a new name")
        if self.journal.nbytes() + self.state_bytes > self.limits.disk_bytes:
            raise Refused(507, "no room for another stream; delete some that are no longer used")
        seed = secrets.randbits(62) if self.seed is None else generator(self.seed, "stream", owner, name).initial_seed()
        state = {**self._fresh, GENERATOR: torch.Generator().manual_seed(seed).get_state()}
        now = time.time()
        stream = Stream(owner, name, now, now, state, seed)
        self.journal.create(stream)
        self._hot[stream.id] = stream
        self._make_room(stream)

    def _delete(self, identity: str) -> None:
        if not self.journal.exists(identity):
            raise Refused(404, "there is no such stream")
        self.journal.delete(identity)
        self._forget(identity)
        self._tell(identity, None)

    def _forget(self, identity: str) -> None:
        self._hot.pop(identity, None)
        self._bytes.pop(identity, None)
        self._resident = ""
        self.metrics.hot.set(len(self._hot))

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
            self._hot[identity] = stream
            self._make_room(stream)
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

    def _make_room(self, used: Stream) -> None:
        """Park the streams that have been idle longest; on disk they are already."""
        self._bytes[used.id] = used.nbytes
        total = sum(self._bytes.values())
        while len(self._hot) > 1 and total > self.limits.memory_bytes:
            idle, _ = self._hot.popitem(last=False)
            total -= self._bytes.pop(idle, 0)
        self.metrics.hot.set(len(self._hot))

    def _described(
        self, stream: Stream, prediction: Prediction, before: Counter[str], seconds: float, *, adapted: bool
    ) -> Json:
        """The answer as the API gives it."""
        report, probs, labels = prediction.report, prediction.probs.float().cpu(), prediction.labels.tolist()
        happened = stream.memory.counters - before
        suspicion = None if report.signal is None else report.signal.float().cpu()
        unsure = ~torch.isfinite(probs).all(dim=1)
        abstain = (unsure if suspicion is None else unsure | ~(suspicion <= self.served.abstain)).tolist()
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


def _stopping() -> Refused:
    return Refused(503, "the service is stopping; try again later", retry_after=5)


def check_memory(method: Method, limits: Limits) -> None:
    """Before a folder is taken: nobody could use the service."""
    needed = adapted_bytes(method)
    if needed > limits.memory_bytes:
        raise ValueError(
            f"a stream of {method.name} takes {needed} bytes and {limits.memory_bytes} are allowed for all of them. "
            "Allow more memory, or serve a method that adapts less, such as tent"
        )


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
