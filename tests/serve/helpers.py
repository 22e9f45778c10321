"""Start a real server process on loopback, and compute the same stream with the library."""

import asyncio
import contextlib
import io
import os
import random
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
from PIL import Image
from starlette.types import ASGIApp

from safer_tta._internal.seeds import generator
from safer_tta.client import Client
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.serve.engine import Engine
from safer_tta.serve.server import Service
from safer_tta.serve.tokens import Tokens
from safer_tta.training import source_recipe, train_source
from tests.processes import CONTEXT, run_safer

SIDE = 64
SEED = 5
NPY = {"Content-Type": "application/x-npy"}
CHEAP = {"method": "none", "predictor": "plain"}  # where the answers do not matter
TOKENS = Tokens({"anna": "a" * 20, "bert": "b" * 20})
T = TypeVar("T")
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 32
PORTS = iter(sorted(range(16_000 + 500 * WORKER, 16_500 + 500 * WORKER), key=lambda _: random.SystemRandom().random()))


def trained(path: Path, steps: int = 12) -> Path:
    """A small model that has learnt a little."""
    dataset = open_dataset("synthetic", count=60)
    train_source(dataset, "sketch", source_recipe("synthetic", steps=steps, batch=8, every=steps), path)
    return path


def pictures(count: int, size: int = 4, seed: int = 0) -> list[np.ndarray]:
    """Batches of images of the target domain."""
    images = open_dataset("synthetic", count=60).domain("sketch").images
    order = np.random.default_rng(seed).integers(len(images), size=(count, size))
    return [np.ascontiguousarray(images[places]) for places in order]


def free_port() -> int:
    """Return a port once, from a range that only this worker uses, below those that the system assigns."""
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


@contextlib.contextmanager
def engine_of(model: Path, folder: Path, *streams: str, **options: Any) -> Iterator[Engine]:
    """A running engine, and streams of the owner `local` in it."""
    made = engine(model, folder, **options)
    try:
        for name in streams:
            if not made.journal.exists(f"local/{name}"):
                made.create("local", name).result()
        yield made
    finally:
        made.stop()


def send(made: Engine, images: np.ndarray, name: str = "a", key: str | None = None) -> dict[str, Any]:
    """Answer a batch of a stream of `local`."""
    return made.batch(f"local/{name}", images, key, str(hash(images.tobytes()))).result()[0]


def converse(app: ASGIApp, talk: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Return the result of a conversation with an application in this process."""

    async def run() -> T:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as asking:
            return await talk(asking)

    return asyncio.run(run())


class Server:
    """`safer serve` in a process of its own, which can be killed and started again."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *options: str,
        before: Sequence[str] = (),
        side: int | None = SIDE,
        program: Callable[..., None] = run_safer,
    ) -> None:
        self.program = program
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / f"{folder.name}.log"
        settings = ["--model", str(model), "--folder", str(folder), "--port", str(self.port), "--seed", str(SEED)]
        settings += [] if side is None else ["--side", str(side)]
        self.command = [*before, "serve", *settings, *options]
        self.start()

    def start(self) -> None:
        seen = self.log.stat().st_size if self.log.exists() else 0
        self.process = CONTEXT.Process(target=self.program, args=(self.command, self.log, self.log, None, {}))
        self.process.start()
        deadline = time.monotonic() + 60
        while not (self.log.exists() and re.search(rb"serving .* at http", self.log.read_bytes()[seen:])):
            if not self.process.is_alive() or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> int | None:
        self.process.terminate()
        self.process.join(30)
        return self.process.exitcode


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str, **how: Any) -> Iterator[Server]:
    server = Server(model, folder, *options, **how)
    try:
        yield server
    finally:
        server.kill()


class Replay:
    """A stream as the library answers it without a service."""

    def __init__(self, model: Path, name: str, owner: str = "local", **service: Any) -> None:
        method = Service(**{"model": model, "folder": Path("unused"), "side": SIDE, **service}).build()
        self.guard = Guard(method, least_agreement=0)
        method.state.generator.manual_seed(generator(SEED, "stream", owner, name).initial_seed())

    def __call__(self, images: np.ndarray, *, learn: bool = True) -> list[list[float]]:
        return self.guard(torch.from_numpy(images), learn=learn).probs.tolist()  # tests and server have one thread


@contextlib.contextmanager
def meanwhile(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    """Do this work in threads, which are told to stop at the end of the block and have ended after it."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def sending(url: str, name: str) -> Iterator[None]:
    """Send batches to a stream as long as the block lasts."""

    def work(stop: threading.Event) -> None:
        with Client(url) as mine:
            while not stop.is_set():
                mine.send(name, pictures(1, 4)[0])

    with meanwhile(work):
        yield
