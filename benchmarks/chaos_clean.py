"""The honest owner of benchmarks/chaos.py: one keyed batch after another, and what became of each of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chaos_service import SEED, SIDE, Excuses
from rows import Row

from safer_tta._internal.seeds import generator
from safer_tta.client import Client
from safer_tta.errors import ServiceError
from safer_tta.guards import Guard
from safer_tta.serve.server import Service
from serve import percentiles

PAUSE = 0.25  # seconds between two batches: a light owner
PATIENCE = 30.0  # seconds after the end of a phase in which the last batch may still be answered
KEPT = 200  # of the last batches whose stored answers are asked for; the service keeps 256
TOLERANCE = 1e-6  # between an answer and the library's
DOCUMENTED = {503, 507}  # of the server's errors

Replay = Callable[[np.ndarray], list[list[float]]]  # from images to probabilities, one batch after another


def library(model: Path, owner: str, name: str) -> Replay:
    """Return a stream as the library answers it without a service."""
    method = Service(model=model, folder=Path("unused"), side=SIDE).build()
    guard = Guard(method, least_agreement=0)
    method.state.generator.manual_seed(generator(SEED, "stream", owner, name).initial_seed())
    # Always learning, as the service does while only one batch of a stream waits.
    return lambda images: guard(torch.from_numpy(images)).probs.tolist()


@dataclass
class Batch:
    """A batch that was sent, and what came of it."""

    key: str
    images: np.ndarray
    begun: float
    ended: float = 0.0
    answer: dict[str, Any] | None = None
    given_up: list[float] = field(default_factory=list)  # when the client had used up its retries


class Clean:
    """Sends batches to one stream of its own from a thread, as long as the block lasts."""

    def __init__(self, open_client: Callable[[], Client], name: str, batches: Sequence[np.ndarray]) -> None:
        self.open_client, self.name, self.batches = open_client, name, batches
        self.sent: list[Batch] = []
        self.statuses: Counter[int] = Counter()
        self.requests, self.problems = 0, Counter[str]()
        self._stop, self._over = threading.Event(), float("inf")
        self._thread = threading.Thread(target=self._talk, daemon=True)

    def __enter__(self) -> Clean:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(0)

    def finish(self, patience: float = PATIENCE) -> None:
        """Send nothing new, and wait this long for the answer to the last batch."""
        self._over = min(self._over, time.monotonic() + patience)
        self._stop.set()
        self._thread.join()

    @contextlib.contextmanager
    def _client(self) -> Iterator[Client]:
        """Open a client whose every request and answer is counted."""

        def asked(_: object) -> None:
            self.requests += 1

        def answered(response: Any) -> None:
            self.statuses[response.status_code] += 1

        with self.open_client() as client:
            client._http.event_hooks = {"request": [asked], "response": [answered]}  # it tells nobody of its retries
            yield client

    def _talk(self) -> None:
        with self._client() as client:
            while not self._stop.is_set():
                number = len(self.sent)
                images = self.batches[number % len(self.batches)]
                batch = Batch(f"{self.name}-{number}", images, time.monotonic())
                self.sent.append(batch)
                self._insist(client, batch)
                self._stop.wait(PAUSE)

    def _insist(self, client: Client, batch: Batch) -> None:
        """Send a batch until it is answered, also after the client itself has given up."""
        while batch.answer is None and time.monotonic() < self._over:
            try:
                batch.answer = client.send(self.name, batch.images, key=batch.key)
            except ServiceError as error:
                batch.given_up.append(time.monotonic())
                self.problems[_named(error)] += 1
                self._stop.wait(PAUSE)
            batch.ended = time.monotonic()

    @property
    def answered(self) -> list[Batch]:
        return [batch for batch in self.sent if batch.answer is not None]

    def measure(self, excuses: Excuses, deadline: float | None = None) -> Row:
        """Return how many batches were answered, and how fast. Without a deadline, take that of a calm service."""
        waited = [excuses.counted(batch.begun, batch.ended) for batch in self.answered]
        times = percentiles([1e3 * seconds for seconds in waited]) if len(waited) > 1 else {}
        limit = max(5.0, 10 * times.get("p50_ms", 0.0) / 1e3) if deadline is None else deadline
        failed = [any(not excuses.cover(moment) for moment in batch.given_up) for batch in self.answered]
        in_time = sum(seconds <= limit and not gone for seconds, gone in zip(waited, failed, strict=True))
        # What an excuse covers until the very end had no chance of an answer.
        open_still = [b for b in self.sent if b.answer is None and excuses.counted(b.begun, b.ended) > limit]
        counted = len(waited) + len(open_still)
        return {
            "sent": len(self.sent), "answered": len(waited), "in_time": in_time, **times,
            "availability": 100 * in_time / counted if counted else 0.0,
            "retries": self.requests - len(self.sent), "given_up": sum(failed) + len(open_still), "deadline_s": limit,
        }  # fmt: skip

    def audit(self) -> Row:
        """Count batches that were acknowledged and are gone, and batches that were applied without being asked for."""
        with self.open_client() as client:
            try:
                stored = int(client.stream(self.name)["batches"])
                lost = self._lost(client, stored)
            except ServiceError as error:
                self.problems[f"cannot be read at the end: {_named(error)}"] += 1
                return {"lost": len(self.answered), "doubled": 0}
        acknowledged = {batch.answer["number"] for batch in self.answered if batch.answer is not None}
        unknown = set(range(1, max([stored, *acknowledged]) + 1)) - acknowledged
        pending = len(self.sent) - len(self.answered)  # each may have been applied once
        return {"lost": lost, "doubled": max(0, len(unknown) - pending)}

    def _lost(self, client: Client, stored: int) -> int:
        lost: set[str] = set()
        latest: dict[int, str] = {}
        for batch in self.answered:
            assert batch.answer is not None
            number = batch.answer["number"]
            lost |= {latest[number]} if number in latest else set()  # another batch has taken its place
            lost |= {batch.key} if number > stored else set()
            latest[number] = batch.key
        for batch in self.answered[-KEPT:]:
            if batch.key not in lost and client.send(self.name, batch.images, key=batch.key) != batch.answer:
                lost.add(batch.key)
        return len(lost)

    def compare(self, replay: Replay) -> Row:
        """Count answers that are the library's to the last bit, and those that differ from it."""
        exact = different = 0
        for batch in self.answered:
            assert batch.answer is not None
            expected = replay(batch.images)
            given = batch.answer["probabilities"]
            exact += given == expected
            near = np.allclose(np.array(given, float), np.array(expected, float), rtol=0, atol=TOLERANCE)
            different += not near
        return {"exact": exact, "different": different}


def _named(error: ServiceError) -> str:
    return f"{error.status} {error.message.partition('(')[0][:80].strip()}" if error.status else "no answer"


def server_errors(statuses: Counter[int]) -> Row:
    """Count the server's errors that are documented, and name the others."""
    errors = {status: count for status, count in statuses.items() if status >= 500}
    listed = " ".join(f"{status}:{count}" for status, count in sorted(errors.items()))
    undocumented = sum(count for status, count in errors.items() if status not in DOCUMENTED)
    return {"errors_5xx": listed, "undocumented_5xx": undocumented}
