"""Faults of the machine in benchmarks/chaos.py: kills, stops, a full disk, damaged pages, a clock that jumps.

Each is a context: it disturbs the service until its time is over, and puts everything back at the end of the block.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from chaos_service import Disk, NotStartedError, Running

from safer_tta.client import Client
from safer_tta.errors import ServiceError

VICTIM = "sacrifice"  # a stream of the hostile owner
CLOCK = Path(__file__).with_name("chaos_clock.c")
YEAR = 31_556_952  # seconds
JUMPS = (-1, 11, -60, 200, 0)  # years from now; Linux takes no clock beyond 2232, and Python none beyond 2262


@dataclass
class Scene:
    """What a fault has at hand."""

    service: Running
    disk: Disk
    seconds: float
    wait: Callable[[float], None]  # for so many seconds, showing progress
    images: np.ndarray
    statuses: list[int] = field(default_factory=list)  # that the hostile owner was answered
    notes: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, *, token: bool = True, **content: Any) -> tuple[int, dict[str, Any]]:
        """Ask as the hostile owner, and return the status and what came with it; 0 without an answer."""
        headers = {"Authorization": f"Bearer {self.service.tokens['hostile']}"} if token else {}
        try:
            url = f"{self.service.url}{path}"
            answer = httpx.request(method, url, headers=headers, timeout=20, trust_env=False, **content)
        except httpx.HTTPError:
            return 0, {}
        self.statuses.append(answer.status_code)
        return answer.status_code, answer.json() if "json" in answer.headers.get("content-type", "") else {}

    def told(self, method: str, path: str, *, token: bool = True) -> str:
        """Ask as the hostile owner, and name the last part of the address and the status."""
        what = path.rpartition("/")[2] if method != "DELETE" else "delete"
        return f"{what} {self.ask(method, path, token=token)[0]}"

    def ready(self) -> str:
        return self.told("GET", "/readyz", token=False)

    def hostile(self) -> Client:
        return Client(self.service.url, self.service.tokens["hostile"], timeout=20, retries=2)

    def sacrifice(self, *names: str) -> None:
        """Make streams of the hostile owner that have learnt something."""
        with self.hostile() as client:
            for name in names:
                client.create(name)
                for _ in range(3):
                    client.send(name, self.images)

    def try_victims(self, *names: str) -> None:
        """Use damaged streams in every way, and note the answers."""
        told = [self.told("GET", "/v1/streams")]
        for name in names:
            path = f"/v1/streams/{name}"
            told.append(f"batch {self._send(name)}")
            told += [self.told("POST", f"{path}/{verb}") for verb in ("rollback", "reset")]
            told += [f"batch {self._send(name)}", self.told("DELETE", path)]
        self.notes.append("damaged: " + ", ".join(told))

    def _send(self, name: str) -> int:
        with self.hostile() as client:
            try:
                client.send(name, self.images)
            except ServiceError as error:
                self.statuses.append(error.status)
                return error.status
        return 200


Fault = Callable[[Scene], AbstractContextManager[None]]


@contextlib.contextmanager
def nothing(scene: Scene) -> Iterator[None]:
    scene.wait(scene.seconds)
    yield


@contextlib.contextmanager
def kills(scene: Scene) -> Iterator[None]:
    """SIGKILL at random moments, and a new start each time."""
    yield from _ends(scene, scene.service.kill, "kills")


@contextlib.contextmanager
def stops(scene: Scene) -> Iterator[None]:
    """SIGTERM at random moments, and a new start each time."""
    codes: list[int] = []
    yield from _ends(scene, lambda: codes.append(scene.service.stop()), "stops")
    scene.notes.append(f"exit codes {sorted(set(codes))}")


def _ends(scene: Scene, end: Callable[[], object], what: str) -> Iterator[None]:
    draws, left, count = random.Random(0), scene.seconds, 0
    while count == 0 or left > 0:
        pause = min(draws.uniform(3.0, 9.0), max(1.0, left / 2))
        scene.wait(pause)
        with scene.service.excuses.excused():
            end()
            scene.service.start()
        count, left = count + 1, left - pause
    scene.notes.append(f"{count} {what}")
    scene.wait(min(3.0, scene.seconds / 4))
    yield


@contextlib.contextmanager
def full_disk(scene: Scene) -> Iterator[None]:
    """No block is free for a third of the time."""
    scene.sacrifice(VICTIM)
    scene.wait(scene.seconds / 3)
    with scene.service.excuses.excused(), scene.disk.full():
        scene.wait(scene.seconds / 3)
        path = f"/v1/streams/{VICTIM}"
        told = [scene.ready(), scene.told("POST", f"{path}/reset"), scene.told("DELETE", path)]
        scene.notes.append(f"while full: {', '.join(told)}")
    scene.wait(scene.seconds / 3)
    scene.notes.append(f"afterwards: {scene.ready()}")
    scene.ask("DELETE", f"/v1/streams/{VICTIM}")
    yield


@contextlib.contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    """The file system is write-protected under the service if the system lets us; otherwise when it starts."""
    scene.wait(scene.seconds / 3)
    service = scene.service
    problem = scene.disk.write_protect(True)
    if problem:
        with service.excuses.excused():
            service.stop()
            scene.notes.append(f"only at a start, since it is busy; remount: {scene.disk.write_protect(True) or 'ok'}")
            try:
                service.start()
                scene.notes.append(f"it started; {scene.ready()}")
                service.stop()
            except NotStartedError as error:
                told = str(error).strip().splitlines()[-1:]  # with the reason
                scene.notes.append(f"refused to start: {' '.join(told).replace(str(service.folder), 'FOLDER')}")
            finally:
                scene.disk.write_protect(False)
            service.start()
    else:
        with service.excuses.excused():
            scene.wait(scene.seconds / 3)
            scene.notes.append(f"while read-only: {scene.ready()}")
            scene.disk.write_protect(False)
    scene.wait(scene.seconds / 3)
    yield


@contextlib.contextmanager
def damaged_page(scene: Scene) -> Iterator[None]:
    """While the service is down, a page of the database that belongs to a hostile stream becomes noise."""
    yield from _damaged(scene, [VICTIM], lambda file: _spoil_page(file, f"hostile/{VICTIM}"))


@contextlib.contextmanager
def damaged_state(scene: Scene) -> Iterator[None]:
    """While the service is down, stored states of hostile streams are cut short, changed or replaced."""
    changes: list[Callable[[bytes], bytes]] = [
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob.replace(b"exp_avg_sq", b"exp_avg_sx"),
        lambda blob: blob[:-64] + bytes(64),
        lambda blob: b"12345678 nonsense",
    ]
    names = [f"{VICTIM}-{number}" for number in range(len(changes))]

    def spoil(file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            for name, change in zip(names, changes, strict=True):
                (blob,) = database.execute("select state from states where stream = ?", [f"hostile/{name}"]).fetchone()
                database.execute("update states set state = ? where stream = ?", [change(blob), f"hostile/{name}"])

    yield from _damaged(scene, names, spoil)


def _damaged(scene: Scene, names: list[str], spoil: Callable[[Path], None]) -> Iterator[None]:
    scene.sacrifice(*names)
    scene.wait(scene.seconds / 4)
    with scene.service.restored():
        with scene.service.stopped():
            spoil(scene.service.folder / "streams.sqlite")
        scene.notes.append(scene.ready())
        scene.try_victims(*names)
        scene.wait(scene.seconds * 3 / 4)
        yield


def _spoil_page(file: Path, stream: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("pragma wal_checkpoint(truncate)")
        (size,) = database.execute("pragma page_size").fetchone()
        (state,) = database.execute("select state from states where stream = ?", [stream]).fetchone()
    content = bytearray(file.read_bytes())
    # What occurs once in the file lies in a page of this stream alone.
    place = next(p for p in range(size * 3, len(state), 64) if content.count(state[p : p + 64]) == 1)
    page = content.find(state[place : place + 64]) // size
    content[page * size : (page + 1) * size] = random.Random(0).randbytes(size)
    file.write_bytes(content)


@contextlib.contextmanager
def clock_jumps(scene: Scene) -> Iterator[None]:
    """The clock of the service jumps to other years and back while it runs."""
    library, clock = scene.service.model.parent / "clock.so", scene.service.model.parent / "clock"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(CLOCK)], check=True)
    clock.write_bytes(struct.pack("=q", 0))
    with scene.service.stopped({"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}):
        pass
    try:
        scene.notes.append("years seen: " + ", ".join(_jump(scene, clock, years) for years in JUMPS))
        yield
    finally:
        with scene.service.stopped():
            pass


def _jump(scene: Scene, clock: Path, years: int) -> str:
    """Set the clock of the service, and return the year in which it then creates a stream."""
    with clock.open("r+b") as file:
        file.write(struct.pack("=q", years * YEAR))
    scene.wait(scene.seconds / len(JUMPS))
    name = f"year-{years}"
    status, told = scene.ask("POST", "/v1/streams", json={"name": name})
    scene.ask("DELETE", f"/v1/streams/{name}")
    return str(int(1970 + told["created"] / YEAR)) if status == 201 else f"status {status}"


def why_not(fault: Fault, disk: Disk) -> str:
    """Return why a fault cannot be made here; nothing if it can."""
    if fault in (full_disk, read_only) and disk.problem:
        return f"no file system of its own could be mounted: {disk.problem}"
    if fault is clock_jumps and (shutil.which("cc") is None or sys.platform != "linux"):
        return "the clock of a process is moved by a library that a C compiler makes on Linux"
    return ""
