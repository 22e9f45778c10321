"""A small memory of images to learn from later: the columns of NOTE's, SoTTA's and RoTTA's memories.

Columns lie in the method's declared state under `memory_*`, one row an image, so saving and resetting come for free.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Generator, Tensor

from ..models.norm import running_statistics
from ..predictors import Prediction
from .base import Method
from .state import State


class ImageMemory:
    """Rows of (image, label, extra columns). What to keep and what to replace is the method's business."""

    def __init__(self, state: State, *extra: str) -> None:
        self.state = state
        self.columns = ("image", "label", *extra)
        for column in self.columns:
            state.memory[f"memory_{column}"] = torch.empty(0, device=state.classifier.device)
        state.memory["waiting"] = torch.zeros((), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self["label"])

    def __getitem__(self, column: str) -> Tensor:
        return self.state.memory[f"memory_{column}"]

    def __setitem__(self, column: str, values: Tensor) -> None:
        self.state.memory[f"memory_{column}"] = values

    def due(self, every: int) -> bool:
        """Count one more image; true for the last of every `every`, when it is time to learn from the memory."""
        waiting = (int(self.state.memory["waiting"]) + 1) % every
        self.state.memory["waiting"] = torch.tensor(waiting, dtype=torch.int64)
        return waiting == 0

    def check_size(self, images: Tensor) -> None:
        """Images are learnt from together, so they have one size."""
        held = self["image"]
        if len(held) and held.shape[1:] != images.shape[1:]:
            raise ValueError(
                f"images are {tuple(images.shape[1:])} and the memory holds {tuple(held.shape[1:])}; expected one size "
                "for the whole stream. Resize, or reset() first"
            )

    def append(self, **row: Tensor) -> None:
        empty = len(self) == 0
        for column in self.columns:
            new = row[column][None]
            self[column] = new.clone() if empty else torch.cat([self[column], new])  # never the caller's own

    def replace(self, place: int, **row: Tensor) -> None:
        for column in self.columns:
            values = self[column].clone()
            values[place] = row[column]
            self[column] = values

    def remove(self, place: int) -> None:
        keep = torch.arange(len(self), device=self["label"].device) != place
        for column in self.columns:
            self[column] = self[column][keep]

    def counts(self, classes: int) -> Tensor:
        """How many rows every class has."""
        labels = self["label"]
        return torch.bincount(labels, minlength=classes) if len(self) else torch.zeros(classes, dtype=torch.int64)

    def crowded(self, classes: int) -> list[int]:
        """The classes with the most rows."""
        counts = self.counts(classes)
        return torch.nonzero(counts == counts.max()).flatten().tolist()

    def any_of(self, labels: list[int], generator: Generator) -> int:
        """A row of one of these classes: first a class at random, then a row of it."""
        label = labels[int(torch.randint(len(labels), (), generator=generator))]
        places = torch.nonzero(self["label"] == label).flatten()
        return int(places[int(torch.randint(len(places), (), generator=generator))])


class RememberingMethod(Method):
    """Answers by running statistics, and learns from `memory` after the answer: a batch of its own choice."""

    memory: ImageMemory

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, None]:
        self.memory.check_size(images)
        with self.answering():
            return self.predictor(images, draw), None

    def answering(self) -> contextlib.AbstractContextManager[None]:
        return running_statistics(self.classifier.norms())
