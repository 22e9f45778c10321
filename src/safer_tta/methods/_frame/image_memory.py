"""A small memory of images to learn from later, for NOTE, SoTTA and RoTTA.

Its columns are in the method's declared state under `memory_*`, one row an image, so they are saved and reset with it.
"""

import contextlib

import torch
from torch import Generator, Tensor

from ...errors import InvalidValueError
from ...models.norm import running_statistics
from ...predictors import Draw
from .losses import softmax_entropy
from .method import Method
from .state import State
from .step import Step


class ImageMemory:
    """Rows of (image, label, extra columns). The method decides what to keep and what to replace."""

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
        """Count one more image; return True for the last of every `every`, when it is time to learn from the memory."""
        waiting = (int(self.state.memory["waiting"]) + 1) % every
        self.state.memory["waiting"] = torch.tensor(waiting, dtype=torch.int64)
        return waiting == 0

    def check_size(self, images: Tensor) -> None:
        """Refuse images of another size than those held, since they are learnt from together."""
        held = self["image"]
        if len(held) and held.shape[1:] != images.shape[1:]:
            raise InvalidValueError(
                f"images are {tuple(images.shape[1:])} and the memory holds {tuple(held.shape[1:])}; expected one size "
                "for the whole stream. Resize, or reset() first"
            )

    def append(self, **row: Tensor) -> None:
        empty = len(self) == 0
        for column in self.columns:
            new = row[column][None]
            self[column] = new.clone() if empty else torch.cat([self[column], new])  # never the caller's own tensor

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
        """Return how many rows every class has."""
        labels = self["label"]
        return torch.bincount(labels, minlength=classes) if len(self) else torch.zeros(classes, dtype=torch.int64)

    def crowded(self, classes: int) -> list[int]:
        """Return the classes with the most rows."""
        counts = self.counts(classes)
        return torch.nonzero(counts == counts.max()).flatten().tolist()

    def any_of(self, labels: list[int], generator: Generator) -> int:
        """Return a random row of one of these classes: first a class is drawn, then a row of it."""
        label = labels[int(torch.randint(len(labels), (), generator=generator))]
        places = torch.nonzero(self["label"] == label).flatten()
        return int(places[int(torch.randint(len(places), (), generator=generator))])


class RememberingMethod(Method):
    """Answers with running statistics; after the answer, learns the entropy of a batch chosen from `memory`."""

    memory: ImageMemory  # made by `prepare()`
    every: int  # after how many images it learns, an option

    def forward(self, images: Tensor, draw: Draw) -> Step:
        self.memory.check_size(images)
        with self.answering():
            return Step(self.predictor.look(images, draw), None)

    def answering(self) -> contextlib.AbstractContextManager[None]:
        return running_statistics(self.classifier.norms())

    def learn_if_due(self) -> None:
        """Count an image, and learn from the memory if it is time to."""
        if self.memory.due(self.every) and len(self.memory) > 1:  # one image has no statistics to learn with
            images = self.memory["image"]
            draw = self.predictor.draw(images)
            self.learn(lambda: softmax_entropy(self.predictor.look(images, draw).lesson.logits).mean())
