"""The first images of a stream: what a method must still know after it has learnt from later ones.

A collapse shows in the answers themselves. Slow drift does not: a method that learns from noise may keep its answers
spread over all classes while it forgets every one of them. Comparing its answers to the first images with those that it
gave before it had learnt anything shows the drift.
"""

import torch
from torch import Tensor

from ..methods import Method


class Anchor:
    """At most `size` images of one shape, kept as 8-bit on the CPU. They are looked at only on request."""

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self.images: Tensor | None = None
        self._first: Tensor | None = None

    def offer(self, images: Tensor) -> None:
        """Keep these images while there is room."""
        chosen = images.detach()[: self.size - (0 if self.images is None else len(self.images))].cpu()
        if not len(chosen) or (self.images is not None and chosen.shape[1:] != self.images.shape[1:]):
            return
        # Always a copy, since a stream may be read into one buffer that the next batch overwrites.
        chosen = (chosen.clamp(0, 1) * 255).round().to(torch.uint8) if chosen.is_floating_point() else chosen.clone()
        self.images = chosen if self.images is None else torch.cat([self.images, chosen])
        self._first = None

    def agreement(self, method: Method) -> float:
        """Return the share of the images that the method answers now as it would have at its very start."""
        if self.images is None:
            return 1.0
        if self._first is None:
            now = method.state_dict()
            method.restore()
            try:
                self._first = self._answers(method)
            finally:  # a look that fails, for example for lack of memory, must not lose what was learnt
                method.load_state_dict(now)
        return float((self._answers(method) == self._first).float().mean())

    def _answers(self, method: Method) -> Tensor:
        """Answer the images as one batch, since under batch statistics an answer depends on the other images.

        The draw of views is always the same and nothing is remembered, so that only the states are compared.
        """
        assert self.images is not None
        held = method.state.hold()
        method.state.generator.manual_seed(0)
        if method.predictor.memory is not None:
            method.predictor.memory.seen.zero_()
        try:
            return method.predict(self.images).labels.cpu()
        finally:
            method.state.put_back(held)
