"""The engine: one thread that answers the batches of all streams, and what else is to be done with them.

What a batch has changed is on disk before its answer is sent. All work waits in one queue of limited length. If that is
asked for, batches of several streams that wait at the same time take one step together. During a roll-out a shadow
answers every batch too, when nothing else is to be done.
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import JournalError
from ..methods import Snapshot, learnt, moved
from ..predictors import Prediction
from .alarms import Alarms, Change
from .answers import Served, describe
from .feeds import Feeds
from .grouping import Batch, Mode
from .images import Pictures
from .journal import Answered, Journal, Json, Stream
from .lender import Lender, Model
from .limits import Limits, Refused
from .logs import log_failure
from .metrics import Metrics
from .record import Origin, part, part_of_all
from .room import Room, refuse_stopped
from .shadow import Models, Seen, Shadow, refuse_without_shadow
from .upkeep import Upkeep
from .webhook import Sender, Webhook

log = logging.getLogger("safer_tta.serve")


class Before(NamedTuple):
    """What a stream was before a batch."""

    counters: Counter[str]
    state: Snapshot

    @classmethod
    def of(cls, stream: Stream) -> "Before":
        return cls(stream.memory.counters.copy(), stream.state)


@dataclass(frozen=True)
class Job:
    stream: str
    work: Callable[[], Any]
    future: Future[Any]
    batch: Batch | None = None  # what is to be answered, if that is the work
    origin: Origin = field(default_factory=Origin)


class Given(NamedTuple):
    """An answer, the alarms that it raises or clears, and the batch as the shadow is to see it."""

    answered: Answered
    changes: list[Change]
    seen: Seen


class Engine:
    """Answers the batches of all streams with one model, and compares it with another one during a roll-out.

    The journal says which of the models is live. `seed` decides every stream's draws, for replays; None draws a secret
    seed for each stream. A stream whose batches take longer than `seconds` is answered without learning until it has
    caught up.
    """

    def __init__(
        self,
        models: Sequence[Model],
        journal: Journal,
        limits: Limits,
        seed: int | None,
        seconds: float | None,
        webhook: Webhook | None = None,
    ) -> None:
        self.journal, self.limits, self.metrics = journal, limits, Metrics()
        lenders = {model.served.version: Lender(model, journal, limits, seconds, len(models)) for model in models}
        shadow = None if journal.shadow is None else Shadow(lenders[journal.shadow], journal, limits, self.metrics)
        self.models = Models(lenders[journal.live], shadow)
        self.upkeep = Upkeep(self.models, journal, limits, seed)
        self.sender = None if webhook is None else Sender(webhook, self.metrics)
        self.alarms = Alarms(journal, self.metrics, self.sender)
        self.room, self.feeds = Room[Job](limits), Feeds(limits)
        self.metrics.queue.set_function(self.room.jobs.qsize)
        self.metrics.hot.set_function(lambda: len(self.live.hot))
        self.metrics.damaged.set_function(lambda: len(journal.damaged))
        self.metrics.watch(journal.storage.folder, lambda: self.ready)
        self.metrics.tell_build(self.served)
        self._thread = threading.Thread(target=self._run, name="safer-tta engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> Lender:
        return self.models.live

    @property
    def shadow(self) -> Shadow | None:
        return self.models.shadow

    @property
    def served(self) -> Served:
        """What answers at present."""
        return self.live.served

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
        return self.submit(f"{owner}/{name}", lambda: self.upkeep.create(owner, name))

    def delete(self, stream: str) -> Future[None]:
        return self.submit(stream, lambda: self._delete(stream))

    def change(self, stream: str, what: str) -> Future[None]:
        """Freeze, unfreeze, reset or roll back a stream."""
        return self.submit(stream, lambda: self.upkeep.change(stream, what))

    def switch(self, to: str, owner: str) -> Future[bool]:
        """Let this version answer from now on; return whether that changes anything."""
        return self.submit(f"{owner}/", lambda: self._switch(to, owner))

    def rollout(self) -> Json:
        """Return the live model, the shadow and how they compare."""
        if self.shadow is None:
            raise refuse_without_shadow()
        return self.shadow.describe()

    def describe(self, owner: str, name: str | None = None) -> list[Json]:
        """Return an owner's streams, or the one of this name, as the API shows them."""
        found = self.journal.describe(owner, name)
        for stream in found:
            identity = f"{owner}/{stream['name']}"
            hot, damaged = identity in self.live.hot, identity in self.journal.damaged
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
        if self.shadow is not None:
            self.shadow.end()
        if self.sender is not None:
            self.sender.stop()
        self.journal.close()

    # --- on the engine's own thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            jobs, started = [job, *self.live.together.companions(job, self.room.jobs)], time.perf_counter()
            try:
                self._execute_all([job for job in jobs if job.future.set_running_or_notify_cancel()])  # else it is gone
            finally:
                self.room.done(jobs, time.perf_counter() - started)

    def _next(self) -> Job | None:
        """Wait for work; as long as there is none, the shadow works."""
        while self.shadow is not None and self.room.idle and self.shadow.work():
            pass
        return self.room.jobs.get()

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
                self.live.forget(job.stream)
            log.warning("a step for %d streams at once failed; they take turns", len(jobs), exc_info=True)
            return False
        for job, answer in zip(jobs, given, strict=True):
            self._execute(job, functools.partial(self._publish, answer))
        return True

    def _mode(self, job: Job) -> Mode | None:
        """Return how a batch is answered; None if it must be so alone, as one that was answered before."""
        assert job.batch is not None
        try:
            stream = self.live.stream(job.stream)
            if job.batch.key is not None and self.journal.answer(job.stream, job.batch.key) is not None:
                return None
        except Exception:  # its own turn tells what is wrong
            return None
        return self._mode_of(stream)

    def _mode_of(self, stream: Stream) -> Mode:
        in_time = not self.room.crowded(stream.id) and not stream.memory.behind
        return Mode(stream.frozen, in_time or stream.frozen)

    def _execute(self, job: Job, work: Callable[[], Any]) -> None:
        try:
            result = job.origin.run(work)
        except Refused as error:
            job.future.set_exception(error)
        except JournalError as error:  # the log has a line of it
            self.live.forget(job.stream)
            job.future.set_exception(error)
        except BaseException as error:
            # The tensors may be half changed and are thrown away; what is on disk is complete.
            self.live.forget(job.stream)
            job.origin.log(log_failure, "work for a stream failed", error)
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _answer(self, identity: str, batch: Batch) -> tuple[Json, bool]:
        stream = self.live.stream(identity)
        stored = None if batch.key is None else self.journal.answer(identity, batch.key)
        if stored is not None:
            if stored[1] != batch.content:
                problem = f"the Idempotency-Key {batch.key!r} was used for other images of this stream"
                raise Refused(409, f"{problem}; use a new key for a new batch, and an old one only to repeat a batch")
            return stored[0], True
        mode, before = self._mode_of(stream), Before.of(stream)
        try:
            with part("model"):
                prediction, seconds = self.live.answer(stream, batch, mode)
        except ValueError as error:  # the method cannot take such a batch
            self.live.forget(identity)  # it may have begun to change; what is on disk is complete
            log.debug("a batch was refused", exc_info=True)
            raise Refused(422, str(error)) from error
        given = self._note(stream, batch, mode, prediction, before, seconds)
        with part("commit"):
            self.journal.commit(*given.answered)
        return self._publish(given)

    def _answer_together(self, jobs: list[Job], mode: Mode) -> list[Given]:
        streams, batches = [self.live.stream(job.stream) for job in jobs], [job.batch for job in jobs if job.batch]
        with part_of_all("model", [job.origin for job in jobs]) as passed:
            steps = self.live.step(streams, batches, mode)
        given = []
        for stream, batch, taken in zip(streams, batches, steps, strict=True):
            before = Before.of(stream)
            prediction = self.live.adopt(stream, batch, taken, mode, passed() / len(jobs))
            given.append(self._note(stream, batch, mode, prediction, before, passed()))
        with part_of_all("commit", [job.origin for job in jobs]):
            self.journal.commit_many(one.answered for one in given)
        self.live.hot |= {stream.id: stream for stream in streams}  # one may have made room for another
        return given

    def _note(
        self, stream: Stream, batch: Batch, mode: Mode, prediction: Prediction, before: Before, seconds: float
    ) -> Given:
        """Count a batch of a stream, and describe its answer."""
        stream.batches += 1
        stream.images += len(prediction.probs)
        change = {"adapted": learnt(before.state, stream.state), "noted": moved(before.state, stream.state)}
        answer = describe(self.served, stream, prediction, before.counters, seconds=seconds, **change)
        changes = self.alarms.changes(stream)
        events = [change.audited for change in changes]
        seen = Seen(stream.id, stream.batches, batch, mode, answer["labels"], sum(answer["abstain"]), seconds)
        return Given(Answered(stream, answer, batch.key, batch.content, events), changes, seen)

    def _publish(self, given: Given) -> tuple[Json, bool]:
        """Tell everybody of an answer that is on disk, and return it as a new one."""
        stream, answer = given.answered.stream, given.answered.answer
        self.alarms.tell(stream, given.changes, answer["report"])
        self.live.keep(stream)
        if self.shadow is not None:
            self.shadow.offer(given.seen)
        self.metrics.count(answer["report"], stream.owner)
        self.feeds.tell(stream.id, answer["report"])
        return answer, False

    def _delete(self, identity: str) -> None:
        self.upkeep.delete(identity)
        self.alarms.forget(identity)
        self.feeds.tell(identity, None)

    def _switch(self, to: str, owner: str) -> bool:
        alarms = self.journal.alarms(to)  # first: once the switch is on disk, nothing may fail
        if not self.models.switch(to, owner):
            return False
        self.alarms.take_over(alarms)
        self.metrics.tell_build(self.served)
        return True
