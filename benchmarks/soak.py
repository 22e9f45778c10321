"""Send garbage to every method under its guard, and watch the memory of a process over thousands of steps.

For every method: clean batches, then 2,000 batches each of noise, constant images, one repeated image and alternating
NaN batches, then one rollback, each with the accuracy on clean images. And 5,000 steps on a tiny model, with the
process's memory read early and at the end.

python benchmarks/soak.py --out demo/soak.csv        # rows that are there already are not measured again
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import torch
from rows import Row, append, read

import safer_tta
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.methods import METHODS
from safer_tta.training import source_recipe, train_source

KINDS = ("noise", "constant", "repeated", "nan")
FIELDS = (
    "method", "kind", "batches", "start", "before", "after", "rolled_back", "collapses", "rollbacks",
    "drifted_snapshots", "non_finite_answers", "finite", "early_mb", "end_mb",
)  # fmt: skip
QUICK: dict[str, dict[str, Any]] = {"memo": {"copies": 2}, "cotta": {"versions": 2}}
MEMO_SHARE = 20  # MEMO forgets after every image and takes an update for each, so it gets a twentieth of the batches


def garbage(kind: str, number: int, generator: torch.Generator, side: int) -> torch.Tensor:
    """Return the batch of this number."""
    if kind == "constant":
        return torch.full((8, 3, side, side), (number % 11) / 10)
    if kind == "nan" and number % 2:
        return torch.full((8, 3, side, side), torch.nan)
    if kind == "repeated":
        return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1, -1)
    return torch.rand(8, 3, side, side, generator=generator)


def accuracy(method: safer_tta.Method, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy in %, always under the same draws: CoTTA averages random versions of an image."""
    held = method.state.hold()
    method.state.generator.manual_seed(2)
    batches = zip(images.split(64), labels.split(64), strict=True)
    right = sum(int((method.predict(x).labels == y).sum()) for x, y in batches)
    method.state.put_back(held)
    return 100 * right / len(labels)


def soak(name: str, kind: str, batches: int, folder: Path) -> Row:
    """Measure one method under one kind of garbage."""
    dataset = open_dataset("synthetic", count=350)
    source = train_source(dataset, "sketch", source_recipe("synthetic", steps=150), folder / "soak-source.safetensors")
    domain = dataset.domain("sketch")
    clean, labels = torch.from_numpy(domain.images[:192]), torch.from_numpy(domain.labels[:192])
    model, options = copy.deepcopy(source), QUICK.get(name, {})
    method = safer_tta.adapt(model, name, "plain", seed=0, validate=False, **options)
    guard, generator = Guard(method), torch.Generator().manual_seed(1)
    row: Row = {"start": accuracy(method, clean, labels)}
    for images in clean.split(64):
        guard(images)
    row["before"] = accuracy(method, clean, labels)
    batches = batches // MEMO_SHARE if name == "memo" else batches
    for number in range(batches):
        guard(garbage(kind, number, generator, 64))
    tensors = [t for t in guard.state_dict().values() if t.is_floating_point()]
    counters = {field: guard.counters.get(field, 0) for field in FIELDS[7:11]}
    row["after"] = accuracy(method, clean, labels)
    guard.rollback()
    row["rolled_back"] = accuracy(method, clean, labels)
    finite = all(bool(torch.isfinite(t).all()) for t in tensors)
    return {"method": name, "kind": kind, "batches": batches, **row, **counters, "finite": finite}


def memory(name: str, steps: int) -> Row:
    """Measure the resident memory after a tenth of the steps and at the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 3),
    )  # fmt: skip
    guard = Guard(safer_tta.adapt(model, name, "plain", seed=0, **QUICK.get(name, {})))
    generator, early = torch.Generator().manual_seed(0), 0.0
    steps = steps // 10 if name == "memo" else steps
    for number in range(steps):
        guard(torch.rand(4, 3, 16, 16, generator=generator))
        if number == steps // 10:
            early = resident_megabytes()
    return {"method": name, "kind": "memory", "batches": steps, "early_mb": early, "end_mb": resident_megabytes()}


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def work(task: tuple[str, str, int, int, Path]) -> Row:
    name, kind, batches, steps, folder = task
    torch.set_num_threads(1)
    return memory(name, steps) if kind == "memory" else soak(name, kind, batches, folder)


def run(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    done = {(row["method"], row["kind"]) for row in read(options.out)}
    tasks = [
        (name, kind, options.batches, options.steps, options.folder)
        for kind in (*KINDS, "memory")
        for name in options.methods
        if (name, kind) not in done
    ]
    soak("none", "noise", 1, options.folder)  # trains the source before the processes need it
    # A fresh process for every task: the memory of one says nothing about another.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for number, row in enumerate(pool.imap_unordered(work, tasks), start=1):
            append(options.out, FIELDS, row)
            print(f"{number}/{len(tasks)}", row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--folder", type=Path, default=Path("demo"))
    parser.add_argument("--methods", nargs="*", default=sorted(METHODS))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
