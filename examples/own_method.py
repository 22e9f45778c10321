"""Balanced entropy: make every answer certain, and the answers of the stream as a whole varied.

A method of your own is one file with one class and one decorator; `adapt` then knows its name.
Objective: mean over the batch of H(p), minus H of the running mean of the stream's predictions. The scale and shift of
the normalisation layers learn, with batch statistics.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import safer_tta
from safer_tta import methods
from safer_tta.data import Stream, StreamSpec, open_dataset
from safer_tta.models.norm import use_batch_statistics
from safer_tta.training import source_recipe, train_source

TARGET = "painting"
LR = 0.03  # far above the usual rate, because the stream is short


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs.clamp_min(1e-6)).sum(dim=-1)


@methods.register("balanced")
class Balanced(methods.Method):
    updates = "norm"  # which parameters learn
    lr: float = methods.option(1e-3, methods.positive)
    momentum: float = methods.option(0.5, methods.share)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        # A memory that is declared here belongs to the state: reset, save, load and a guard's rollback include it.
        classes = self.classifier.num_classes
        self.state.memory["mean"] = self.classifier.head.weight.new_full((classes,), 1 / classes)

    def forward(self, images: Tensor, draw: Any) -> methods.Step:
        """Compute the loss. This writes nothing, because it may be called twice for one batch."""
        seen = self.predictor.look(images, draw)
        probs = seen.lesson.probs
        mean = self.momentum * self.state.memory["mean"] + (1 - self.momentum) * probs.mean(dim=0)
        return methods.Step(seen, entropy(probs).mean() - entropy(mean), kept={"mean": mean})

    def commit(self, images: Tensor, step: methods.Step) -> None:
        """Write the memory. This runs only after a healthy step."""
        self.state.memory["mean"] = step.kept["mean"]


def accuracy(method: methods.Method, stream: Stream) -> float:
    right = [method(batch.images).labels == batch.labels for batch in stream]
    return 100 * float(torch.cat(right).float().mean())


def main() -> None:
    dataset = open_dataset("synthetic", count=320)
    recipe = source_recipe("synthetic", steps=80, batch=16, lr=2e-3)
    with tempfile.TemporaryDirectory() as folder:
        source = train_source(dataset, TARGET, recipe, Path(folder) / "source.safetensors")
    stream = Stream([dataset.domain(TARGET)], StreamSpec(batch=40))

    print(f"balanced: {methods.describe('balanced')['what']}\n")  # the first line of the file
    predictors = ("plain", "safer-g")
    print(f"{f'accuracy on {TARGET}, %':24}" + "".join(f"{predictor:>8}" for predictor in predictors))
    for name in ("tent", "balanced"):
        figures = [accuracy(safer_tta.adapt(source, name, p, seed=0, lr=LR), stream) for p in predictors]
        print(f"{name:24}" + "".join(f"{figure:8.1f}" for figure in figures))

    # Options are keyword arguments. An unknown one is refused by name.
    adapted = safer_tta.adapt(source, "balanced", seed=0, momentum=0.8)
    try:
        safer_tta.adapt(source, "balanced", momentun=0.8)
    except safer_tta.SaferError as error:
        print(f"\nrefused: {error}")

    # What the base class does with the declared memory.
    accuracy(adapted, stream)
    print(f"mean prediction of the stream: {_row(adapted.state.memory['mean'])}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        adapted.save(path)
        adapted.reset()
        print(f"after reset:                   {_row(adapted.state.memory['mean'])}")
        adapted.load(path)
    print(f"after load:                    {_row(adapted.state.memory['mean'])}")


def _row(values: Tensor) -> str:
    return " ".join(f"{value:.3f}" for value in values.tolist())


if __name__ == "__main__":
    main()
