"""Balanced entropy: make every single answer certain, and the answers of the stream as a whole varied.

A method of one's own in one file: a class and a decorator, and `adapt` knows it.
Objective: mean over the batch of H(p), minus H of the running mean of the stream's predictions. Scale and shift of the
normalisation layers learn, with batch statistics.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import safer_tta
from safer_tta import methods
from safer_tta.data import Stream, StreamSpec, open_dataset
from safer_tta.methods.losses import entropy
from safer_tta.models.norm import use_batch_statistics
from safer_tta.training import source_recipe, train_source

TARGET = "painting"
LR = 0.03  # far above the usual rate: the stream is short


@methods.register("balanced")
class Balanced(methods.Method):
    updates = "norm"  # which parameters learn; the optimiser is made for them

    def __init__(self, predictor: safer_tta.Predictor, *, lr: float = 1e-3, momentum: float = 0.5) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; expected a number in [0,1)")
        self.momentum = momentum
        super().__init__(predictor, lr=lr)

    def prepare(self) -> None:
        use_batch_statistics(self.classifier.norms())
        # Declared here, a memory is part of the state: reset, save, load and a guard's rollback know it.
        classes = self.classifier.num_classes
        self.state.memory["mean"] = self.classifier.head.weight.new_full((classes,), 1 / classes)

    def forward(self, images: Tensor, draw: Any) -> tuple[safer_tta.Prediction, Tensor]:
        """Writes nothing: it may be called twice for one batch. The predictor may be the plain model or SAFER."""
        prediction = self.predictor.lesson(images, draw)
        mean = self._with(prediction)
        variety = -(mean * mean.clamp_min(1e-6).log()).sum()
        return prediction, entropy(prediction.logits).mean() - variety

    def commit(self, images: Tensor, prediction: safer_tta.Prediction) -> None:
        """Only after a healthy step."""
        self.state.memory["mean"] = self._with(prediction)

    def _with(self, prediction: safer_tta.Prediction) -> Tensor:
        """The running mean with this batch in it."""
        return self.momentum * self.state.memory["mean"] + (1 - self.momentum) * prediction.probs.mean(dim=0)


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
    print(f"{f'accuracy on {TARGET}, %':24}{'plain':>8}{'SAFER':>8}")
    for name in ("tent", "balanced"):
        figures = [accuracy(safer_tta.adapt(source, name, safer, seed=0, lr=LR), stream) for safer in (False, True)]
        print(f"{name:24}" + "".join(f"{figure:8.1f}" for figure in figures))

    # Options are keyword arguments of the class; a wrong one is named.
    adapted = safer_tta.adapt(source, "balanced", seed=0, momentum=0.8)
    try:
        safer_tta.adapt(source, "balanced", momentun=0.8)
    except TypeError as error:
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
