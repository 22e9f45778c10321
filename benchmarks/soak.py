"""Long runs of garbage under the guard, and memory over thousands of steps; the figures go to docs/results/soak.md.

For every method: clean batches, then 2,000 batches each of noise, constant images, one repeated image and alternating
NaN batches, then rollback, then the accuracy on clean images against the start. Afterwards 5,000 steps on a tiny model
with the process's memory read before and after.
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys

import torch

import safer_tta
from safer_tta.data import open_dataset
from safer_tta.guards import Guard
from safer_tta.methods import METHODS
from safer_tta.training import source_recipe, train_source

KINDS = ("noise", "constant", "repeated", "nan")
QUICK = {"memo": {"copies": 2}, "cotta": {"versions": 2}}


def garbage(kind: str, number: int, generator: torch.Generator, side: int) -> torch.Tensor:
    if kind == "constant":
        return torch.full((8, 3, side, side), (number % 11) / 10)
    if kind == "nan" and number % 2:
        return torch.full((8, 3, side, side), torch.nan)
    if kind == "repeated":
        return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)).expand(8, -1, -1, -1)
    return torch.rand(8, 3, side, side, generator=generator)


def accuracy(method: safer_tta.Method, images: torch.Tensor, labels: torch.Tensor) -> float:
    right = sum(
        int((method.predict(x).labels == y).sum()) for x, y in zip(images.split(64), labels.split(64), strict=True)
    )
    return 100 * right / len(labels)


def soak(batches: int, folder: str, names: list[str], kinds: list[str]) -> None:
    dataset = open_dataset("synthetic", count=350)
    recipe = source_recipe("synthetic", steps=150)
    source = train_source(dataset, "sketch", recipe, f"{folder}/soak-source.safetensors")
    domain = dataset.domain("sketch")
    clean, labels = torch.from_numpy(domain.images[:192]), torch.from_numpy(domain.labels[:192])
    print(
        "| method | garbage | before | after it | one rollback | to the start | collapses | rollbacks | NaN answers |"
    )

    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        for kind in kinds:
            method = safer_tta.adapt(
                copy.deepcopy(source), name, safer=False, seed=0, validate=False, **QUICK.get(name, {})
            )
            guard, generator = Guard(method), torch.Generator().manual_seed(1)
            for images in clean.split(64):
                guard(images)
            before = accuracy(method, clean, labels)
            for number in range(batches if name != "memo" else batches // 20):
                guard(garbage(kind, number, generator, 64))
            assert all(bool(torch.isfinite(t).all()) for t in guard.state_dict().values() if t.is_floating_point())
            c = dict(guard.counters)
            figures = [before, accuracy(method, clean, labels)]
            guard.rollback()
            figures.append(accuracy(method, clean, labels))
            while guard.healthy:
                guard.rollback()
            guard.rollback()
            figures.append(accuracy(method, clean, labels))
            counts = [c.get(key, 0) for key in ("collapses", "rollbacks", "non_finite_answers")]
            print(
                f"| {name} | {kind} | " + " | ".join([*(f"{f:.1f}" for f in figures), *map(str, counts)]) + " |",
                flush=True,
            )


def memory(steps: int, names: list[str]) -> None:
    print("\n| method | MB after 500 steps | MB at the end |\n|---|---|---|")
    images = torch.rand(4, 3, 16, 16)
    for name in names:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 3),
        )  # fmt: skip
        guard = Guard(safer_tta.adapt(model, name, safer=False, seed=0, **QUICK.get(name, {})))
        early = 0.0
        for number in range(steps if name != "memo" else steps // 10):
            guard(images + 0 * number)
            if number == 500 or (name == "memo" and number == 50):
                early = _megabytes()
        print(f"| {name} | {early:.0f} | {_megabytes():.0f} |", flush=True)


def _megabytes() -> float:
    """Resident now, not at the peak."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--folder", default="demo")
    parser.add_argument("--methods", nargs="*", default=sorted(METHODS))
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="of garbage; none: memory only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak(options.batches, options.folder, options.methods, options.kinds)
    memory(options.steps, options.methods)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
