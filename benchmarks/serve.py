"""Measure what the service adds to the library, and many streams at once.

The same batches go to `safer serve` over loopback and to a method in this process, taking turns.

python benchmarks/serve.py --out demo/serve.csv
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rows import Row, append, machine

import safer_tta
from safer_tta.client import Client
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.serve.server import Service
from safer_tta.training import source_recipe, train_source

FIELDS = (
    "section", "what", "streams", "batch", "rounds", "requests", "p50_ms", "p99_ms", "ratio", "images_per_s",
    "machine", "torch",
)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    safer_tta.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "source.safetensors"
        train_source(open_dataset("synthetic", count=200), "sketch", source_recipe("synthetic", steps=30), model)
        process, url = start(model, Path(folder) / "served", options.port)
        try:
            for row in [*latency(options, model, url), *throughput(options, url)]:
                append(options.out, FIELDS, {**row, "machine": machine(), "torch": torch.__version__})
                print(row)
        finally:
            process.terminate()
            process.wait()


def start(model: Path, folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start the service and return its process and address once it answers."""
    settings = ["--model", str(model), "--folder", str(folder), "--side", "64", "--port", str(port), "--rate", "1e6"]
    process = subprocess.Popen([sys.executable, "-m", "safer_tta.cli", "serve", *settings])
    url = f"http://127.0.0.1:{port}"
    with Client(url, retries=30) as client:
        client.model()
    return process, url


def pictures(size: int, seed: int) -> np.ndarray:
    images = open_dataset("synthetic", count=200).domain("sketch").images
    return np.ascontiguousarray(images[np.random.default_rng(seed).integers(len(images), size=size)])


def milliseconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begun)


def latency(options: argparse.Namespace, model: Path, url: str) -> list[Row]:
    """Measure one client: the library, the library under guard and the service, in turns."""
    build = Service(model=model, folder=Path("unused"), side=64).build
    bare, guarded = build(), Guard(build(), least_agreement=0)
    times: dict[str, list[float]] = {"library": [], "library under guard": [], "service": []}
    with Client(url) as client:
        client.create("latency")
        for number in range(options.rounds + 2):
            images = pictures(options.batch, number)
            taken = {
                "library": milliseconds(lambda x=images: bare(torch.from_numpy(x))),
                "library under guard": milliseconds(lambda x=images: guarded(torch.from_numpy(x))),
                "service": milliseconds(lambda x=images: client.send("latency", x)),
            }
            for name in times if number >= 2 else ():
                times[name].append(taken[name])
    rows = []
    for name, taken_by in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken_by, times["library"], strict=True))
        row = {"section": "latency", "what": name, "batch": options.batch, "rounds": options.rounds}
        rows.append({**row, **percentiles(taken_by), "ratio": ratio})
    return rows


def percentiles(taken: list[float]) -> Row:
    """Return the median and the 99th percentile, which is never beyond the slowest."""
    hundredths = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50_ms": hundredths[49], "p99_ms": hundredths[98]}


def throughput(options: argparse.Namespace, url: str) -> list[Row]:
    """Measure many streams at once, each with a client of its own."""
    rows, batches = [], [pictures(options.batch, number) for number in range(8)]
    for streams in options.streams:
        each = max(2, options.requests // streams)
        taken: list[float] = []

        def talk(name: str, each: int = each, taken: list[float] = taken) -> None:
            with Client(url, retries=100) as client:
                client.create(name)
                sends = (functools.partial(client.send, name, batches[n % len(batches)]) for n in range(each))
                taken.extend(map(milliseconds, sends))

        begun = time.perf_counter()
        with ThreadPoolExecutor(streams) as threads:
            list(threads.map(talk, [f"load-{streams}-{n}" for n in range(streams)]))  # raises what a thread raised
        seconds = time.perf_counter() - begun
        row = {"section": "throughput", "streams": streams, "batch": options.batch, "requests": len(taken)}
        rows.append({**row, "images_per_s": options.batch * len(taken) / seconds, **percentiles(taken)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64], help="how many at once")
    parser.add_argument("--port", type=int, default=8099)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
