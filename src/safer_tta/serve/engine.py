"""The engine: one method in memory, lent to one stream at a time by one thread.

A stream's state goes in before its batch and comes out after it, and is on disk before the answer is sent. All work
with the method waits in one queue of limited length.
"""

import contextlib
import logging
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

from .._internal.seeds import generator
from ..errors import InvalidValueError
from ..guards import Guard
from ..methods import GENERATOR, Method, learnt
from .answers import Served, describe
from .images import Pictures
from .journal import Journal, Json, Stream
from .limits import Limits, Refused
from .metrics import Metrics

log = logging.getLogger("safer_tta.serve")

Listener = Callable[[Json | None], object]


@dataclass(frozen=True)
class Job:
    stream: str
    work: Callable[[], Any]
    future: Future[Any]


class Engine:
    """Answers the batches of all streams with one method.

    `seed` decides every stream's draws, for replays; None draws a secret seed for each stream. A stream whose batches
    take longer than `seconds` is answered without learning until it has caught up.
    """

    def __init__(
        self, method: Method, served: Served, journal: Journal, limits: Limits, seed: int | None, seconds: float | None
    ) -> None:
        # No anchor images: they would take more room than everything else of a stream.
        self.guard = Guard(method, least_agreement=0, seconds=seconds)
        self.method, self.served, self.journal = method, served, journal
        self.limits, self.metrics, self.seed = limits, Metrics(), seed
        self.state_bytes = adapted_bytes(method)
        self._fresh = method.state_dict()
        self._hot: OrderedDict[str, Stream] = OrderedDict()
        self._resident = ""  # the stream whose state is in the method
        self._jobs: queue.Queue[Job | None] = queue.Queue(limits.queue)
        self.metrics.queue.set_function(self._jobs.qsize)
        self._waiting: Counter[str] = Counter()
        self._bytes: dict[str, int] = {}  # of each hot stream
        self._lock = threading.RLock()
        self._listeners: dict[str, set[Listener]] = {}
        self._pace = 0.1  # seconds that a job takes, from which the time in Retry-After follows
        self.running = True
        self._thread = threading.Thread(target=self._run, name="safer-tta engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------

    def submit(self, stream: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self.check_room(stream)
            self._jobs.put_nowait(Job(stream, work, future))
            self._waiting[stream] += 1
        return future

    def check_room(self, stream: str) -> None:
        """Refuse more work; asked early too, before a body is read and decoded in vain."""
        with self._lock:
            if not self.running:
                raise _refuse_stopped()
            if self._waiting[stream] >= self.limits.stream_queue:
                raise self._refuse("too many batches of this stream are waiting already")
            owned = sum(n for name, n in self._waiting.items() if _owner(name) == _owner(stream))
            if owned >= self.limits.owner_queue:
                raise self._refuse("too many batches of this owner are waiting already")
            if self._jobs.full():
                raise self._refuse("the queue of the service is full")

    def batch(self, stream: str, images: Pictures, key: str | None, content: str) -> Future[tuple[Json, bool]]:
        """Return (answer, whether it had been given before); a batch is applied once per key. content: its hash."""
        return self.submit(stream, lambda: self._answer(stream, images, key, content))

    def create(self, owner: str, name: str) -> Future[None]:
        return self.submit(f"{owner}/{name}", lambda: self._create(owner, name))

    def delete(self, stream: str) -> Future[None]:
        return self.submit(stream, lambda: self._delete(stream))

    def change(self, stream: str, what: str) -> Future[None]:
        """Freeze, unfreeze, reset or roll back a stream."""
        return self.submit(stream, lambda: self._change(stream, what))

    def describe(self, owner: str, name: str | None = None) -> list[Json]:
        """Return an owner's streams, or the one of this name, as the API shows them."""
        found = self.journal.describe(owner, name)
        for stream in found:
            stream["state"] = "hot" if f"{owner}/{stream['name']}" in self._hot else "parked"
        return found

    @property
    def ready(self) -> bool:
        """Whether batches are accepted."""
        return self.running and self._thread.is_alive()

    def listen(self, stream: str, listener: Listener) -> Callable[[], None]:
        """Call a listener with every report of a stream, and with None at the end; return a function that stops it."""
        with self._lock:
            feeds = sum(len(them) for name, them in self._listeners.items() if _owner(name) == _owner(stream))
            if feeds >= self.limits.feeds:
                raise Refused(429, f"{feeds} feeds are open already; close some", retry_after=5)
            self._listeners.setdefault(stream, set()).add(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.get(stream, set()).discard(listener)
                if not self._listeners.get(stream):
                    self._listeners.pop(stream, None)

        return stop

    def _notify(self, stream: str, report: Json | None) -> None:
        with self._lock:
            listeners = list(self._listeners.get(stream, ()))
        for listener in listeners:
            try:
                listener(report)
            except Exception:  # the listener has gone away; the batch is answered all the same
                log.info("a listener is gone", exc_info=True)

    def refuse(self) -> None:
        """Accept nothing from now on, refuse what waits and end all feeds. The current batch is finished."""
        with self._lock:
            self.running, left = False, []
            with contextlib.suppress(queue.Empty):
                while True:
                    left.append(self._jobs.get_nowait())
            streams = list(self._listeners)
        for job in left:
            if job is not None and job.future.set_running_or_notify_cancel():  # else the client is gone
                job.future.set_exception(_refuse_stopped())
        for stream in streams:
            self._notify(stream, None)

    def stop(self) -> None:
        """Refuse, finish the current batch, and release the folder."""
        self.refuse()
        self._jobs.put(None)
        self._thread.join(timeout=60)
        self.journal.close()

    def _refuse(self, why: str) -> Refused:
        wait = max(1.0, self._jobs.qsize() * self._pace)
        self.metrics.refused.inc()
        return Refused(429, f"{why}; try again in {wait:.0f} s", retry_after=wait)

    # --- on the engine's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():  # else the client is gone
                    self._execute(job)
            finally:
                with self._lock:
                    self._waiting -= Counter([job.stream])  # which also drops streams with nothing left

    def _execute(self, job: Job) -> None:
        started = time.perf_counter()
        try:
            result = job.work()
        except Refused as error:
            job.future.set_exception(error)
        except BaseException as error:
            # The tensors may be half changed and are thrown away; what is on disk is complete.
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
                raise Refused(409, "this Idempotency-Key was used for other images; use a new key for a new batch")
            return stored[0], True
        self._put_in(stream)
        counters, state, started = stream.memory.counters.copy(), stream.state, time.perf_counter()
        try:
            prediction = self.guard(torch.from_numpy(images), learn=self._waiting[identity] <= self.limits.behind)
        except ValueError as error:  # the method cannot take such a batch
            self._forget(identity)  # it may have begun to change; what is on disk is complete
            log.info("a batch was refused", exc_info=True)
            raise Refused(422, str(error)) from error
        seconds = time.perf_counter() - started
        self._take_out(stream)
        stream.batches += 1
        stream.images += len(images)
        adapted = learnt(state, stream.state)
        answer = describe(self.served, stream, prediction, counters, seconds=seconds, adapted=adapted)
        self.journal.commit(stream, answer, key, content)
        self._make_room(stream)
        self.metrics.count(answer["report"])
        self._notify(identity, answer["report"])
        return answer, False

    def _create(self, owner: str, name: str) -> None:
        if self.journal.exists(f"{owner}/{name}"):
            raise Refused(409, f"a stream {name!r} exists already; choose a new name")
        if self.journal.nbytes() + self.state_bytes > self.limits.disk_bytes:
            raise Refused(507, "there is no room for another stream; delete some that are no longer used")
        seed = secrets.randbits(62) if self.seed is None else generator(self.seed, "stream", owner, name).initial_seed()
        state = {**self._fresh, GENERATOR: torch.Generator().manual_seed(seed).get_state()}
        now = time.time()
        stream = Stream(owner, name, now, now, state, seed)
        self.journal.create(stream)
        self._hot[stream.id] = stream
        self._make_room(stream)

    def _delete(self, identity: str) -> None:
        if not self.journal.exists(identity):
            raise _refuse_missing()
        self.journal.delete(identity)
        self._forget(identity)
        self._notify(identity, None)

    def _forget(self, identity: str) -> None:
        self._hot.pop(identity, None)
        self._bytes.pop(identity, None)
        self._resident = ""
        self.metrics.hot.set(len(self._hot))

    def _change(self, identity: str, what: str) -> None:
        stream = self._stream(identity)
        self._put_in(stream)
        if what == "freeze":
            self.guard.freeze()
        elif what == "unfreeze":
            self.guard.unfreeze()
        elif what == "rollback":
            self.guard.rollback(counted=False)
        else:
            self.guard.reset(seed=stream.seed)
        self._take_out(stream)
        self.journal.change(stream, what)

    def _stream(self, identity: str) -> Stream:
        """Return a stream, read from disk if it is parked."""
        stream = self._hot.get(identity)
        if stream is None:
            stream = self.journal.load(identity)
            if stream is None:
                raise _refuse_missing()
            self._hot[identity] = stream
            self._make_room(stream)
        self._hot.move_to_end(identity)
        return stream

    def _put_in(self, stream: Stream) -> None:
        state = None if self._resident == stream.id else stream.state
        self._resident = ""
        self.guard.lend(stream.memory, frozen=stream.frozen, state=state)
        self._resident = stream.id

    def _take_out(self, stream: Stream) -> None:
        stream.state, stream.memory = self.guard.state_dict(), self.guard.memory
        stream.frozen, stream.last = self.guard.frozen, time.time()

    def _make_room(self, used: Stream) -> None:
        """Park the streams that have been idle longest; they are on disk already."""
        self._bytes[used.id] = used.nbytes
        total = sum(self._bytes.values())
        while len(self._hot) > 1 and total > self.limits.memory_bytes:
            idle, _ = self._hot.popitem(last=False)
            total -= self._bytes.pop(idle, 0)
        self.metrics.hot.set(len(self._hot))


def _owner(stream: str) -> str:
    return stream.partition("/")[0]


def _refuse_stopped() -> Refused:
    return Refused(503, "the service is stopping; try again later", retry_after=5)


def _refuse_missing() -> Refused:
    return Refused(404, "there is no such stream")


def check_memory(method: Method, limits: Limits) -> None:
    """Refuse a method whose state fits no stream into the memory, before a folder is taken."""
    needed = adapted_bytes(method)
    if needed > limits.memory_bytes:
        raise InvalidValueError(
            f"a stream of {method.name} takes {needed} bytes and {limits.memory_bytes} are allowed for all of them. "
            "Allow more memory, or serve a method that adapts less, such as tent"
        )


def adapted_bytes(method: Method) -> int:
    """Return the size of a stream once it has learnt: its state, and the optimiser's two numbers per parameter."""
    learning = sum(p.numel() * p.element_size() for p in method.classifier.model.parameters() if p.requires_grad)
    return method.state_bytes + 2 * learning
