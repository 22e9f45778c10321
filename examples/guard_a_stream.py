"""A camera fails for a while: what Tent learns from the garbage, and what a `Guard` does about it.

There are two failures. A stuck camera sends one picture with sensor noise: all answers become one class, and the guard
notices. Pure noise is answered with several classes, so nothing looks wrong for a long time, but you can ask for a
rollback.
"""

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

import safer_tta
from safer_tta.data import Batch, Domain, Stream, StreamSpec, open_dataset
from safer_tta.guards import Guard
from safer_tta.training import source_recipe, train_source

TARGET = "sketch"
CLEAN, GARBAGE, HELD_OUT = 20, 24, 6  # batches
LR = 0.03  # far above the usual rate, to show in a short script what a long stream does slowly


def stuck(domain: Domain) -> Iterator[Tensor]:
    picture = torch.from_numpy(domain.images[:1]) / 255
    for noise in pure_noise(domain):
        yield (picture + 0.1 * (noise - 0.5)).clamp(0, 1)


def pure_noise(domain: Domain) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.rand(32, *domain.images.shape[1:], generator=generator)


def accuracy(guard: Guard, batches: list[Batch]) -> float:
    """Return the accuracy on held-out images, without learning from them."""
    right = torch.cat([guard.predict(batch.images).labels == batch.labels for batch in batches])
    return 100 * float(right.float().mean())


def show(guard: Guard, batches: list[Batch], when: str) -> None:
    health = ", ".join(f"{name} {count}" for name, count in guard.counters.items() if count)
    print(f"  {when:24} {accuracy(guard, batches):5.1f} %   {health}{'   frozen' if guard.frozen else ''}")


def watch(guard: Guard, garbage: Iterator[Tensor], clean: list[Batch], held_out: list[Batch]) -> None:
    """Stream clean batches, then garbage. Every answer has the counters in prediction.report.health."""
    for batch in clean:
        guard(batch.images)
    show(guard, held_out, "after clean batches")
    seen = 0
    for number, images in enumerate(islice(garbage, GARBAGE), start=1):
        health = guard(images).report.health
        if health["collapses"] > seen:
            seen = health["collapses"]
            print(f"    garbage batch {number}: collapse found, policy {guard.policy}")
    show(guard, held_out, "after garbage")


def main() -> None:
    dataset = open_dataset("synthetic", count=840)
    recipe = source_recipe("synthetic", steps=80, batch=16, lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        source = train_source(dataset, TARGET, recipe, Path(folder) / "source.safetensors")
    domain = dataset.domain(TARGET)
    batches = list(Stream([domain], StreamSpec(batch=32)))
    clean, held_out = batches[:CLEAN], batches[CLEAN : CLEAN + HELD_OUT]

    for policy in ("warn", "rollback", "freeze"):  # "warn" only counts: this is what happens without a guard
        print(f"a stuck camera, policy {policy}: accuracy on held-out images, and the counters")
        guard = Guard(safer_tta.adapt(source, "tent", "plain", seed=0, lr=LR), policy=policy)
        watch(guard, stuck(domain), clean, held_out)

    print("pure noise, policy rollback")
    guard = Guard(safer_tta.adapt(source, "tent", "plain", seed=0, lr=LR), policy="rollback")
    watch(guard, pure_noise(domain), clean, held_out)
    guard.rollback()  # skips states that no longer answer the stream's first images as before
    show(guard, held_out, "after guard.rollback()")


if __name__ == "__main__":
    main()
