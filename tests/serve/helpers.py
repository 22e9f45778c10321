"""A real server process on loopback, and the same stream in the library beside it."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from safer_tta._internal.seeds import generator
from safer_tta.client import Client
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.serve.engine import Engine
from safer_tta.serve.server import Service
from safer_tta.training import source_recipe, train_source

SIDE = 64
SEED = 5
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 32
PORTS = iter(sorted(range(16_000 + 500 * WORKER, 16_500 + 500 * WORKER), key=lambda _: random.SystemRandom().random()))


def trained(path: Path) -> Path:
    """A small model that has learnt a little."""
    dataset = open_dataset("synthetic", count=60)
    train_source(dataset, "sketch", source_recipe("synthetic", steps=12, batch=8, every=12), path)
    return path


def pictures(count: int, size: int = 4, seed: int = 0) -> list[np.ndarray]:
    """Batches of images of the target domain."""
    images = open_dataset("synthetic", count=60).domain("sketch").images
    order = np.random.default_rng(seed).integers(len(images), size=(count, size))
    return [np.ascontiguousarray(images[places]) for places in order]


def free_port() -> int:
    """Return a port once, from a range of this worker's own and below those that the system assigns, so that nothing
    else of this session takes it before the server does."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; old connections do not count
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no port is free")


def image_file(side: int = SIDE, kind: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(256, size=(side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(file, kind)
    return file.getvalue()


def array_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def engine(model: Path, folder: Path, **options: Any) -> Engine:
    """Start an engine in this process; the caller stops it."""
    return Service(**{"model": model, "folder": folder, "side": SIDE, "seed": SEED, **options}).engine()


class Server:
    """`safer serve` in a process of its own, which can be killed and started again."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.log = folder.parent / f"{folder.name}.log"
        settings = ["--model", str(model), "--folder", str(folder), "--side", str(SIDE), "--port", str(self.port)]
        self.command = [sys.executable, "-m", "safer_tta.cli", "serve", *settings, "--seed", str(SEED), *options]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self.log, "ab") as log:
            start = log.tell()
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 60
        while not re.search(rb"serving .* at http", self.log.read_bytes()[start:]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(model, folder, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


class Replay:
    """A stream as the library alone would have answered it."""

    def __init__(self, model: Path, name: str, owner: str = "local") -> None:
        method = Service(model=model, folder=Path("unused"), side=SIDE).build()
        self.guard = Guard(method, least_agreement=0)
        method.state.generator.manual_seed(generator(SEED, "stream", owner, name).initial_seed())

    def __call__(self, images: np.ndarray, *, learn: bool = True) -> list[list[float]]:
        return self.guard(torch.from_numpy(images), learn=learn).probs.tolist()  # tests and server have one thread


def client(server: Server, token: str | None = None, **options: object) -> Client:
    return Client(server.url, token, **options)  # type: ignore[arg-type]
