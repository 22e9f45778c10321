"""What the service adds to the library: the same batches to `safer serve` over loopback and to a method in this
process, taking turns; then many streams at once. Rows as JSON Lines, the page from the rows.

python benchmarks/serve.py run --out docs/results/serve-cpu.jsonl
python benchmarks/serve.py page docs/results/serve-*.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import safer_tta
from safer_tta.client import Client
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.serve.server import Service
from safer_tta.training import source_recipe, train_source

Row = dict[str, Any]


def run(o: argparse.Namespace) -> None:
    safer_tta.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder, open(o.out, "a") as file:
        model = Path(folder) / "source.safetensors"
        train_source(open_dataset("synthetic", count=200), "sketch", source_recipe("synthetic", steps=30), model)
        process, url = started(model, Path(folder) / "served", o.port)
        try:
            for row in [*latency(o, model, url), *throughput(o, url)]:
                told = {
                    **row,
                    "machine": f"CPU {platform.machine()}, {os.cpu_count()} cores",
                    "torch": torch.__version__,
                }
                file.write(json.dumps(told) + "\n")
                print(row)
        finally:
            process.terminate()
            process.wait()


def started(model: Path, folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    settings = ["--model", str(model), "--folder", str(folder), "--side", "64", "--port", str(port), "--rate", "1e6"]
    process = subprocess.Popen([sys.executable, "-m", "safer_tta.cli", "serve", *settings])
    url = f"http://127.0.0.1:{port}"
    with Client(url, retries=30) as client:
        client.model()
    return process, url


def pictures(size: int, seed: int) -> np.ndarray:
    images = open_dataset("synthetic", count=200).domain("sketch").images
    return np.ascontiguousarray(images[np.random.default_rng(seed).integers(len(images), size=size)])


def latency(o: argparse.Namespace, model: Path, url: str) -> list[Row]:
    """One client: the library, the library under guard, the service; in turns."""
    build = Service(model=model, folder=Path("unused"), side=64).build
    bare, guarded = build(), Guard(build(), least_agreement=0)
    times: dict[str, list[float]] = {"library": [], "library under guard": [], "service": []}
    with Client(url) as client:
        client.create("latency")
        for number in range(o.rounds + 2):
            images = pictures(o.batch, number)
            for name, ask in (
                ("library", lambda x=images: bare(torch.from_numpy(x))),
                ("library under guard", lambda x=images: guarded(torch.from_numpy(x))),
                ("service", lambda x=images: client.send("latency", x)),
            ):
                begun = time.perf_counter()
                ask()
                if number >= 2:
                    times[name].append(1e3 * (time.perf_counter() - begun))
    rows = []
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, times["library"], strict=True))
        row = {"section": "latency", "what": name, "batch": o.batch, "rounds": o.rounds}
        rows.append({**row, **percentiles(taken), "ratio": ratio})
    return rows


def percentiles(taken: list[float]) -> Row:
    """Of what was seen: never beyond the slowest."""
    hundredths = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50_ms": hundredths[49], "p99_ms": hundredths[98]}


def throughput(o: argparse.Namespace, url: str) -> list[Row]:
    """Many streams at once, each with a client of its own."""
    rows, batches = [], [pictures(o.batch, number) for number in range(8)]
    for streams in o.streams:
        each = max(2, o.requests // streams)
        taken: list[float] = []

        def talk(name: str, each: int = each, taken: list[float] = taken) -> None:
            with Client(url, retries=100) as client:
                client.create(name)
                for number in range(each):
                    begun = time.perf_counter()
                    client.send(name, batches[number % len(batches)])
                    taken.append(1e3 * (time.perf_counter() - begun))

        begun = time.perf_counter()
        with ThreadPoolExecutor(streams) as threads:
            list(threads.map(talk, [f"load-{streams}-{n}" for n in range(streams)]))  # raises what one of them raised
        seconds = time.perf_counter() - begun
        row = {"section": "throughput", "streams": streams, "batch": o.batch, "requests": len(taken)}
        rows.append({**row, "images_per_s": o.batch * len(taken) / seconds, **percentiles(taken)})
    return rows


HEADERS = {
    "latency": ("what", "batch", "p50_ms", "p99_ms", "ratio", "rounds"),
    "throughput": ("streams", "batch", "images_per_s", "p50_ms", "p99_ms", "requests"),
}


def page(rows: list[Row]) -> str:
    lines = [f"## The service: {rows[0]['machine']}, torch {rows[0]['torch']}", ""]
    for section, columns in HEADERS.items():
        lines += [f"### {(latency if section == 'latency' else throughput).__doc__}", ""]
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in (row for row in rows if row["section"] == section):
            shown = (f"{row[c]:.2f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
            lines.append(f"| {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--batch", type=int, default=64)
    runner.add_argument("--rounds", type=int, default=60)
    runner.add_argument("--requests", type=int, default=128)
    runner.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64], help="at once")
    runner.add_argument("--port", type=int, default=8099)
    commands.add_parser("page").add_argument("rows", nargs="+", type=Path)
    o = parser.parse_args()
    if o.command == "run":
        run(o)
    else:
        sys.stdout.write(page([json.loads(line) for path in o.rows for line in path.read_text().splitlines()]))


if __name__ == "__main__":
    main()
