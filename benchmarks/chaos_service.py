"""The service that benchmarks/chaos.py disturbs: its process, its disk, and the times in which it may be away."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

SIDE, SEED = 64, 5
PATIENCE = 90.0  # seconds that a start may take on a busy machine
DISK_MEGABYTES = 128


class NotStartedError(Exception):
    """The service did not start."""


class Excuses:
    """The times in which the harness itself keeps the service away. They do not count against availability."""

    def __init__(self) -> None:
        self.spans: list[list[float]] = []

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        span = [time.monotonic(), float("inf")]
        self.spans.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic()

    def counted(self, begun: float, ended: float) -> float:
        """Return the seconds between two moments that no excuse covers."""
        covered, reached = 0.0, begun
        for first, last in sorted(self.spans):
            covered += max(0.0, min(last, ended) - max(first, reached))
            reached = max(reached, min(last, ended))
        return ended - begun - covered

    def cover(self, moment: float) -> bool:
        return any(first <= moment <= last for first, last in self.spans)


class Disk:
    """A small file system of its own in memory, if this user may mount one; otherwise a plain folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.problem = self._mount(f"size={DISK_MEGABYTES}m", "-t", "tmpfs", "tmpfs")

    def _mount(self, options: str, *more: str) -> str:
        """Mount, and return what went wrong."""
        command = ["mount", "-o", options, *more, str(self.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            return str(error)
        return done.stderr.strip() or ("" if done.returncode == 0 else f"mount ended with {done.returncode}")

    def write_protect(self, protected: bool) -> str:
        """Make the file system read-only or writable, and return what went wrong."""
        return self._mount(f"remount,{'ro' if protected else 'rw'}")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room for a single block."""
        ballast = self.folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in (2**20, 2**12):
                    with contextlib.suppress(OSError):
                        while file.write(b"\1" * size) == size:
                            pass
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.problem:
            for options in ([], ["-l"]):  # with -l also while something still holds a file
                if subprocess.run(["umount", *options, str(self.folder)], check=False).returncode == 0:
                    return


class Running:
    """`safer serve` with two owners, which can be killed, stopped and started again on the same port and folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.tokens = {owner: secrets.token_urlsafe(24) for owner in ("clean", "hostile")}
        self.excuses = Excuses()
        self.log = model.parent / "service.log"
        self._tokens = model.parent / "tokens.json"
        self._tokens.write_text(json.dumps(self.tokens))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start it and wait until it answers. The wait is excused."""
        settings = {
            "model": self.model, "folder": self.folder, "tokens": self._tokens,
            "port": self.port, "side": SIDE, "seed": SEED,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with self.excuses.excused(), self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "safer_tta.cli", "serve", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )  # fmt: skip
            deadline = time.monotonic() + PATIENCE
            while not self._answers():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise NotStartedError(self.log.read_text(errors="replace")[-600:])
                time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            httpx.get(f"{self.url}/healthz", timeout=2, trust_env=False)
        except httpx.HTTPError:
            return False
        return True

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    @contextlib.contextmanager
    def stopped(self, environment: Mapping[str, str] | None = None) -> Iterator[None]:
        """Stop it for the block, and start it again afterwards."""
        with self.excuses.excused():
            self.stop()
            try:
                yield
            finally:
                self.start(environment)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the folder back as it was, once the block has ended."""
        aside = self.model.parent / "aside"
        with self.stopped():
            shutil.copytree(self.folder, aside)
        try:
            yield
        finally:
            with self.stopped():
                shutil.rmtree(self.folder)
                shutil.move(aside, self.folder)

    def usage(self) -> tuple[float, int]:
        """Return the resident memory in MB and the number of open files; zeros while it is away."""
        try:
            proc = Path("/proc", str(self.process.pid if self.process else 0))
            pages = int((proc / "statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list((proc / "fd").iterdir()))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                raise
            return 0.0, 0
