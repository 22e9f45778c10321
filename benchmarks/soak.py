"""Long runs of garbage under the guard, and memory over thousands of steps; rows as JSON Lines, the page from the rows.

For every method: clean batches, then 2,000 batches each of noise, constant images, one repeated image and alternating
NaN batches, then one rollback, then the accuracy on clean images against the start. And 5,000 steps on a tiny model
with the process's memory read early and at the end.

python benchmarks/soak.py run --out docs/results/soak.jsonl        # rows that are there already are not run again
python benchmarks/soak.py page docs/results/soak.jsonl > docs/results/soak.md
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import safer_tta
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.methods import METHODS
from safer_tta.training import source_recipe, train_source

KINDS = ("noise", "constant", "repeated", "nan")
QUICK: dict[str, dict[str, Any]] = {"memo": {"copies": 2}, "cotta": {"versions": 2}}
MEMO_SHARE = 20  # MEMO forgets after every image, and takes an update for each: a twentieth of the batches


def garbage(kind: str, number: int, generator: torch.Generator, side: int) -> torch.Tensor:
    if kind == "constant":
        return torch.full((8, 3, side, side), (number % 11) / 10)
    if kind == "nan" and number % 2:
        return torch.full((8, 3, side, side), torch.nan)
    if kind == "repeated":
        return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1, -1)
    return torch.rand(8, 3, side, side, generator=generator)


def accuracy(method: safer_tta.Method, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Under one draw of views every time: weights are compared and not luck (CoTTA averages random versions)."""
    held = method.state.hold()
    method.state.generator.manual_seed(2)
    batches = zip(images.split(64), labels.split(64), strict=True)
    right = sum(int((method.predict(x).labels == y).sum()) for x, y in batches)
    method.state.put_back(held)
    return 100 * right / len(labels)


def soak(name: str, kind: str, batches: int, folder: Path) -> dict[str, Any]:
    dataset = open_dataset("synthetic", count=350)
    source = train_source(dataset, "sketch", source_recipe("synthetic", steps=150), folder / "soak-source.safetensors")
    domain = dataset.domain("sketch")
    clean, labels = torch.from_numpy(domain.images[:192]), torch.from_numpy(domain.labels[:192])
    method = safer_tta.adapt(copy.deepcopy(source), name, safer=False, seed=0, validate=False, **QUICK.get(name, {}))
    guard, generator = Guard(method), torch.Generator().manual_seed(1)
    row = {"start": accuracy(method, clean, labels)}
    for images in clean.split(64):
        guard(images)
    row["before"] = accuracy(method, clean, labels)
    batches = batches // MEMO_SHARE if name == "memo" else batches
    for number in range(batches):
        guard(garbage(kind, number, generator, 64))
    tensors = [t for t in guard.state_dict().values() if t.is_floating_point()]
    counters = dict(guard.counters)
    row["after"] = accuracy(method, clean, labels)
    guard.rollback()
    row["rolled_back"] = accuracy(method, clean, labels)
    finite = all(bool(torch.isfinite(t).all()) for t in tensors)
    return {**counters, "method": name, "kind": kind, "batches": batches, "finite": finite, **row}


def memory(name: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 3),
    )  # fmt: skip
    guard = Guard(safer_tta.adapt(model, name, safer=False, seed=0, **QUICK.get(name, {})))
    generator, early = torch.Generator().manual_seed(0), 0.0
    steps = steps // 10 if name == "memo" else steps
    for number in range(steps):
        guard(torch.rand(4, 3, 16, 16, generator=generator))
        if number == steps // 10:
            early = _megabytes()
    return {"method": name, "kind": "memory", "batches": steps, "early_mb": early, "end_mb": _megabytes()}


def _megabytes() -> float:
    """Resident now, not at the peak."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def _work(task: tuple[str, str, int, int, Path]) -> dict[str, Any]:
    name, kind, batches, steps, folder = task
    torch.set_num_threads(1)
    return memory(name, steps) if kind == "memory" else soak(name, kind, batches, folder)


def run(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = read(options.out) if options.out.exists() else []
    done = {(row["method"], row["kind"]) for row in rows}
    tasks = [
        (name, kind, options.batches, options.steps, options.folder)
        for kind in (*KINDS, "memory")
        for name in options.methods
        if (name, kind) not in done
    ]
    soak("none", "noise", 1, options.folder)  # trains the source once, before the others want it
    # One fresh process per task: memory of one says nothing about another.
    with (
        open(options.out, "a") as file,
        multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool,
    ):
        for number, row in enumerate(pool.imap_unordered(_work, tasks), start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number}/{len(tasks)}", row, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def page(rows: list[dict[str, Any]]) -> str:
    """The tables; what they show is written by hand below them."""
    soaked = [row for row in rows if row["kind"] != "memory"]
    lines = [
        "# Soak: garbage under the guard, and memory over thousands of steps",
        "",
        "`make soak`: a small network trained on the embedded data; three clean batches, then 2,000 batches (MEMO:",
        "100) of pure noise, constant images, one repeated image, or alternating noise and NaN batches, eight images",
        "each, under `Guard(method)` with its defaults. Accuracy in % on 192 clean images: the source model as",
        "wrapped, after the three clean batches, after the garbage, and after one `rollback()`.",
        "",
        "| method | garbage | start | before | after it | rolled back | collapses | rollbacks | states passed over "
        "| NaN answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(soaked, key=lambda row: (row["method"], KINDS.index(row["kind"]))):
        figures = [f"{row[key]:.1f}" for key in ("start", "before", "after", "rolled_back")]
        keys = ("collapses", "rollbacks", "drifted_snapshots", "non_finite_answers")
        cells = [row["method"], row["kind"], *figures, *(str(row.get(key, 0)) for key in keys)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Resident megabytes early (after a tenth of the steps) and at the end of 5,000 steps (MEMO: 500) on a",
    ]
    lines += ["tiny model.", "", "| method | early | at the end |", "|---|---|---|"]
    for row in sorted((row for row in rows if row["kind"] == "memory"), key=lambda row: row["method"]):
        lines.append(f"| {row['method']} | {row['early_mb']:.0f} | {row['end_mb']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--out", type=Path, required=True)
    runner.add_argument("--batches", type=int, default=2000)
    runner.add_argument("--steps", type=int, default=5000)
    runner.add_argument("--folder", type=Path, default=Path("demo"))
    runner.add_argument("--methods", nargs="*", default=sorted(METHODS))
    commands.add_parser("page").add_argument("rows", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        sys.stdout.write(page(read(options.rows)))


if __name__ == "__main__":
    main()
