"""The engine: one method in memory, lent to one stream at a time by one thread.

A stream's state goes in before its batch and comes out after it, and is on disk before the answer is sent. All work
with the method waits in one queue of limited length. If that is asked for, batches of several streams that wait at the
same time take one step together.
"""

import functools
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import __version__
from .._internal.seeds import generator
from ..errors import DamagedStreamError, JournalError
from ..guards import Guard
from ..methods import GENERATOR, Method, Snapshot, learnt, moved
from ..predictors import Prediction
from .alarms import Alarms, Change
from .answers import Served, describe
from .feeds import Feeds
from .grouping import Batch, Mode, Together
from .images import Pictures
from .journal import Answered, Journal, Json, Stream
from .limits import Limits, Refused
from .logs import log_failure
from .metrics import Metrics
from .record import Origin, part, part_of_all
from .room import Room, refuse_stopped
from .sizes import adapted_bytes
from .webhook import Sender, Webhook

log = logging.getLogger("safer_tta.serve")


@dataclass(frozen=True)
class Job:
    stream: str
    work: Callable[[], Any]
    future: Future[Any]
    batch: Batch | None = None  # what is to be answered, if that is the work
    origin: Origin = field(default_factory=Origin)


class Given(NamedTuple):
    """An answer, and the alarms that it raises or clears."""

    answered: Answered
    changes: list[Change]


class Engine:
    """Answers the batches of all streams with one method.

    `seed` decides every stream's draws, for replays; None draws a secret seed for each stream. A stream whose batches
    take longer than `seconds` is answered without learning until it has caught up.
    """

    def __init__(
        self,
        method: Method,
        served: Served,
        journal: Journal,
        limits: Limits,
        seed: int | None,
        seconds: float | None,
        webhook: Webhook | None = None,
    ) -> None:
        # No anchor images: they would take more room than everything else of a stream.
        abstain = 0.0 if served.abstain is None else served.abstain  # None: there is no suspicion to compare
        self.guard = Guard(method, least_agreement=0, seconds=seconds, abstain=abstain)
        self.method, self.served, self.journal = method, served, journal
        self.limits, self.metrics, self.seed = limits, Metrics(), seed
        self.sender = None if webhook is None else Sender(webhook, self.metrics)
        self.alarms = Alarms(journal, self.metrics, self.sender)
        self.state_bytes = adapted_bytes(method)
        self._together = Together(method, served.side, limits.batch_streams)
        self._fresh = method.state_dict()
        self._hot: OrderedDict[str, Stream] = OrderedDict()
        self._resident = ""  # the stream whose state is in the method
        self.room, self.feeds = Room[Job](limits), Feeds(limits)
        self.metrics.queue.set_function(self.room.jobs.qsize)
        self.metrics.damaged.set_function(lambda: len(journal.damaged))
        self.metrics.watch(
            journal.storage.folder, lambda: self.ready, version=__version__, model=served.version, method=served.method,
            predictor=served.predictor,
        )  # fmt: skip
        self._bytes: dict[str, int] = {}  # of each hot stream
        self._thread = threading.Thread(target=self._run, name="safer-tta engine", daemon=True)
        self._thread.start()

    # --- from any thread ----------------------------------------------------------------------------------------

    def submit(self, stream: str, work: Callable[[], Any], batch: Batch | None = None) -> Future[Any]:
        job = Job(stream, work, Future(), batch)
        self.room.put(job)
        job.future.add_done_callback(lambda future: self.room.leave(job) if future.cancelled() else None)
        return job.future

    def batch(self, stream: str, images: Pictures, key: str | None, content: str) -> Future[tuple[Json, bool]]:
        """Return (answer, whether it had been given before); a batch is applied once per key. content: its hash."""
        batch = Batch(images, key, content)
        return self.submit(stream, lambda: self._answer(stream, batch), batch)

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
            identity = f"{owner}/{stream['name']}"
            hot, damaged = identity in self._hot, identity in self.journal.damaged
            stream["state"] = "hot" if hot else "damaged" if damaged else "parked"
        return found

    def readiness(self) -> dict[str, str]:
        """Return why batches are not accepted, by what is in the way; nothing if they are."""
        reasons = {}
        if not self.room.open:
            reasons["engine"] = "the service is stopping"
        elif not self._thread.is_alive():
            reasons["engine"] = "the thread that answers batches has ended; restart the service"
        elif trouble := self.journal.trouble():
            reasons["storage"] = trouble
        return reasons

    @property
    def ready(self) -> bool:
        """Whether batches are accepted."""
        return not self.readiness()

    def refuse(self) -> None:
        """Accept nothing from now on, refuse what waits and end all feeds. The current batch is finished."""
        for job in self.room.close():
            if job.future.set_running_or_notify_cancel():  # else the client is gone
                job.future.set_exception(refuse_stopped())
        self.feeds.end()

    def stop(self) -> None:
        """Refuse, finish the current batch, and release the folder."""
        self.refuse()
        self.room.jobs.close()
        self._thread.join(timeout=60)
        if self.sender is not None:
            self.sender.stop()
        self.journal.close()

    # --- on the engine's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self.room.jobs.get()) is not None:
            jobs, started = [job, *self._together.companions(job, self.room.jobs)], time.perf_counter()
            try:
                self._execute_all([job for job in jobs if job.future.set_running_or_notify_cancel()])  # else it is gone
            finally:
                self.room.done(jobs, time.perf_counter() - started)

    def _execute_all(self, jobs: list[Job]) -> None:
        """Answer those batches together that can be; everything else has its turn."""
        alike: dict[Mode | None, list[Job]] = {}
        for job in jobs:
            job.origin.begin()
            alike.setdefault(self._mode(job) if len(jobs) > 1 else None, []).append(job)
        for mode, group in alike.items():
            if mode is None or len(group) == 1 or not self._execute_together(group, mode):
                for job in group:
                    self._execute(job, job.work)

    def _execute_together(self, jobs: list[Job], mode: Mode) -> bool:
        """Answer batches of several streams by one step. If that fails, nothing has happened."""
        try:
            given = self._answer_together(jobs, mode)
        except Exception:
            for job in jobs:
                self._forget(job.stream)
            log.warning("a step for %d streams at once failed; they take turns", len(jobs), exc_info=True)
            return False
        for job, answer in zip(jobs, given, strict=True):
            self._execute(job, functools.partial(self._publish, answer))
        return True

    def _mode(self, job: Job) -> Mode | None:
        """Return how a batch is answered; None if it must be so alone, as one that was answered before."""
        assert job.batch is not None
        try:
            stream = self._stream(job.stream)
            if job.batch.key is not None and self.journal.answer(job.stream, job.batch.key) is not None:
                return None
        except Exception:  # its own turn tells what is wrong
            return None
        in_time = not self.room.crowded(job.stream) and not stream.memory.behind
        return Mode(stream.frozen, in_time or stream.frozen)

    def _execute(self, job: Job, work: Callable[[], Any]) -> None:
        try:
            result = job.origin.run(work)
        except Refused as error:
            job.future.set_exception(error)
        except JournalError as error:  # the log has a line of it
            self._forget(job.stream)
            job.future.set_exception(error)
        except BaseException as error:
            # The tensors may be half changed and are thrown away; what is on disk is complete.
            self._forget(job.stream)
            job.origin.log(log_failure, "work for a stream failed", error)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _answer(self, identity: str, batch: Batch) -> tuple[Json, bool]:
        stream = self._stream(identity)
        stored = None if batch.key is None else self.journal.answer(identity, batch.key)
        if stored is not None:
            if stored[1] != batch.content:
                problem = f"the Idempotency-Key {batch.key!r} was used for other images of this stream"
                raise Refused(409, f"{problem}; use a new key for a new batch, and an old one only to repeat a batch")
            return stored[0], True
        self._put_in(stream)
        counters, state, started = stream.memory.counters.copy(), stream.state, time.perf_counter()
        try:
            with part("model"):
                prediction = self.guard(torch.from_numpy(batch.images), learn=not self.room.crowded(identity))
        except ValueError as error:  # the method cannot take such a batch
            self._forget(identity)  # it may have begun to change; what is on disk is complete
            log.debug("a batch was refused", exc_info=True)
            raise Refused(422, str(error)) from error
        given = self._note(stream, batch, prediction, counters, state, time.perf_counter() - started)
        with part("commit"):
            self.journal.commit(*given.answered)
        return self._publish(given)

    def _answer_together(self, jobs: list[Job], mode: Mode) -> list[Given]:
        streams, batches = [self._stream(job.stream) for job in jobs], [job.batch for job in jobs if job.batch]
        self._resident, given = "", []
        with part_of_all("model", [job.origin for job in jobs]) as passed:
            steps = self._together.step([stream.state for stream in streams], batches, mode)
        for stream, batch, taken in zip(streams, batches, steps, strict=True):
            counters, state, images = stream.memory.counters.copy(), stream.state, torch.from_numpy(batch.images)
            how = {**mode._asdict(), "seconds": passed() / len(jobs)}
            prediction = self.guard.adopt(stream.memory, images, taken, **how)
            given.append(self._note(stream, batch, prediction, counters, state, passed()))
        with part_of_all("commit", [job.origin for job in jobs]):
            self.journal.commit_many(one.answered for one in given)
        self._hot |= {stream.id: stream for stream in streams}  # one may have made room for another
        return given

    def _note(
        self,
        stream: Stream,
        batch: Batch,
        prediction: Prediction,
        counters: Counter[str],
        state: Snapshot,
        taken: float,
    ) -> Given:
        """Count a batch of a stream, and describe its answer; counters and state are those from before."""
        self._take_out(stream)
        stream.batches += 1
        stream.images += len(prediction.probs)
        change = {"adapted": learnt(state, stream.state), "noted": moved(state, stream.state)}
        answer = describe(self.served, stream, prediction, counters, seconds=taken, **change)
        changes = self.alarms.changes(stream)
        events = [change.audited for change in changes]
        return Given(Answered(stream, answer, batch.key, batch.content, events), changes)

    def _publish(self, given: Given) -> tuple[Json, bool]:
        """Tell everybody of an answer that is on disk, and return it as a new one."""
        stream, answer = given.answered.stream, given.answered.answer
        self.alarms.tell(stream, given.changes, answer["report"])
        self._make_room(stream)
        self.metrics.count(answer["report"], stream.owner)
        self.feeds.tell(stream.id, answer["report"])
        return answer, False

    def _create(self, owner: str, name: str) -> None:
        if self.journal.exists(f"{owner}/{name}"):
            raise Refused(409, f"a stream {name!r} exists already; choose a new name, or use that stream")
        if self.journal.count(owner) >= (most := self.limits.owner_streams):
            raise Refused(507, f"you have {most} streams already; delete some that are not used", reason="quota")
        if (used := self.journal.nbytes()) + self.state_bytes > self.limits.disk_bytes:
            problem = f"there is no room for {self.state_bytes} bytes: streams take {used} of {self.limits.disk_bytes}"
            raise Refused(507, f"{problem}; delete some that are no longer used")
        seed, now = self._draw_seed(owner, name), time.time()
        stream = Stream(owner, name, now, now, self._start(seed), seed)
        self.journal.create(stream)
        self._hot[stream.id] = stream
        self._make_room(stream)

    def _draw_seed(self, owner: str, name: str) -> int:
        return secrets.randbits(62) if self.seed is None else generator(self.seed, "stream", owner, name).initial_seed()

    def _start(self, seed: int) -> Snapshot:
        """Return the state of a stream before its first batch."""
        return {**self._fresh, GENERATOR: torch.Generator().manual_seed(seed).get_state()}

    def _delete(self, identity: str) -> None:
        if not self.journal.exists(identity):
            raise _refuse_missing()
        self.journal.delete(identity)
        self._forget(identity)
        self.alarms.forget(identity)
        self.feeds.tell(identity, None)

    def _forget(self, identity: str) -> None:
        self._hot.pop(identity, None)
        self._bytes.pop(identity, None)
        self._resident = ""
        self.metrics.hot.set(len(self._hot))

    def _change(self, identity: str, what: str) -> None:
        try:
            stream = self._stream(identity)
        except DamagedStreamError:
            if what != "reset":
                raise
            return self._renew(identity)
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
        return self.journal.change(stream, what)

    def _renew(self, identity: str) -> None:
        """Start a stream anew whose stored state is damaged; its name, its numbers and its answers are kept."""
        owner, _, name = identity.partition("/")
        known = self.journal.salvage(identity)
        known["seed"] = self._draw_seed(owner, name) if known["seed"] is None else known["seed"]
        stream = Stream(owner=owner, name=name, last=time.time(), state=self._start(known["seed"]), **known)
        self.journal.renew(stream)
        self._hot[identity] = stream
        self._make_room(stream)

    def _stream(self, identity: str) -> Stream:
        """Return a stream, read from disk if it is parked."""
        stream = self._hot.get(identity)
        if stream is None:
            stream = self.journal.load(identity, self.method.state.check)
            if stream is None:
                raise _refuse_missing()
            stream.state = stream.state or self._start(stream.seed)
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
        stream.state, stream.memory = self.guard.lent_state(), self.guard.memory
        stream.frozen, stream.last = self.guard.frozen, time.time()

    def _make_room(self, used: Stream) -> None:
        """Park the streams that have been idle longest; they are on disk already."""
        self._bytes[used.id] = used.nbytes
        total = sum(self._bytes.values())
        while len(self._hot) > 1 and total > self.limits.memory_bytes:
            idle, _ = self._hot.popitem(last=False)
            total -= self._bytes.pop(idle, 0)
        self.metrics.hot.set(len(self._hot))


def _refuse_missing() -> Refused:
    return Refused(404, "the stream was deleted while this request waited; POST /v1/streams creates one")
