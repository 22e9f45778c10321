"""The statistics of all layers that follow a stream: they move once for every batch that a method learns from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stream_norm import StreamNorm
from .window import LEAST_DIVERSE, Window, independent

Pass = tuple[Tensor, dict[StreamNorm, tuple[Tensor, Tensor]]]  # answers of a pass, and what the layers in it noted


class StreamStatistics(nn.Module):
    """Moves the statistics of a model's batch norms, once for every batch that a method learns from.

    Attributes:
        window: What the layers share.
        layers: The layers that can follow the stream.
        learning: Whether a method that learns uses it.
        tracking: Whether a look at images counts.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.window = Window(classes)
        self.layers: tuple[StreamNorm, ...] = ()
        self.learning, self.tracking = False, True
        self._passes: list[Pass] | None = None  # of the look that is under way
        self._ballot: list[Pass] | None = None  # of the batch that is being learnt from

    def start(self, *, learning: bool) -> None:
        """Begin with a method, which then says which layers follow the stream."""
        self.learning = learning
        for layer in self.layers:
            layer.follows = False

    @property
    def following(self) -> list[StreamNorm]:
        """The layers that a method has told to follow the stream."""
        return [layer for layer in self.layers if layer.follows]

    @property
    def active(self) -> bool:
        """Whether it follows the stream: for methods that learn or normalise with the batch."""
        return self.learning or bool(self.following)

    def open(self) -> None:
        """Forget the votes of a batch that was not learnt from. The next look at images is the one that counts."""
        self._ballot = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, passes through the model are a look at one batch."""
        if not (self.active and self.tracking) or self._ballot is not None or self._passes is not None:
            yield
            return
        self._passes = []
        try:
            yield
            self._ballot = self._passes
        finally:
            self._passes = None

    @torch.no_grad()
    def collect(self, logits: Tensor, views: int) -> None:
        """Take the votes of the pass that has just ended. Some layers may not be part of it, as in auxiliary heads."""
        noted = {layer: layer.noted for layer in self.layers if layer.noted is not None}
        for layer in self.layers:
            layer.noted = None
        if self._passes is not None:
            answers = F.one_hot(logits.argmax(dim=1), logits.shape[1]).float()
            answers = self.window.side_by_side(torch.unflatten(answers, 0, (views, -1)))
            self._passes.append((answers[1:].mean(dim=0) if len(answers) > 1 else answers[0], noted))

    @torch.no_grad()
    def diverse(self) -> Tensor:
        """Return whether the stream, with the batch at hand, shows enough different images to learn from."""
        shares, images = self.window.answers, self.window.images
        if self._ballot:
            shares, images = self.window.after(torch.cat([answers for answers, _ in self._ballot], dim=-2))
        return independent(shares, images) >= LEAST_DIVERSE

    @torch.no_grad()
    def commit(self) -> None:
        """Count the votes for the batches to come."""
        ballot, self._ballot = self._ballot, None
        if not ballot:
            return
        answers = torch.cat([answers for answers, _ in ballot], dim=-2)
        for layer in self.following:
            passes = [noted[layer] for _, noted in ballot if layer in noted]
            if passes:
                layer.remember(passes, answers.shape[-2])
        self.window.add(answers)

    def copy_(self, other: StreamStatistics) -> None:
        """Take over what another copy of the model has noted."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if not mine.follows:
                continue
            mine.votes.copy_(theirs.votes)
            mine.deviations.copy_(theirs.deviations)
