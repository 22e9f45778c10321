"""The first images of a stream: what a method must still know after it has learnt on.

A collapse shows in the answers themselves. Slow drift does not: a method that learns from noise may keep its answers
spread over all classes while it forgets every one of them. What it says of the first images, compared with what it
said before it had learnt anything, shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .methods import Method


class Anchor:
    """At most `size` images of one size, kept as 8-bit on the CPU. They are looked at only when somebody asks."""

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self.images: Tensor | None = None
        self._first: Tensor | None = None

    def offer(self, images: Tensor) -> None:
        """Take images in while there is room."""
        chosen = images.detach()[: self.size - (0 if self.images is None else len(self.images))].cpu()
        if not len(chosen) or (self.images is not None and chosen.shape[1:] != self.images.shape[1:]):
            return
        # Copied either way: whoever reads a stream into one buffer overwrites it with the next batch.
        chosen = (chosen.clamp(0, 1) * 255).round().to(torch.uint8) if chosen.is_floating_point() else chosen.clone()
        self.images = chosen if self.images is None else torch.cat([self.images, chosen])
        self._first = None

    def agreement(self, method: Method) -> float:
        """The share of the images that the method, as it stands, answers as it would have at its very start."""
        if self.images is None:
            return 1.0
        if self._first is None:
            now = method.state_dict()
            method.restore()
            try:
                self._first = self._answers(method)
            finally:  # a look that fails, for want of memory say, must not cost what was learnt
                method.load_state_dict(now)
        return float((self._answers(method) == self._first).float().mean())

    def _answers(self, method: Method) -> Tensor:
        """As one batch, since under batch statistics an answer depends on the images beside it; and always under the
        same draw of views and with nothing remembered, so that states are compared and not their luck."""
        assert self.images is not None
        held = method.state.hold()
        method.state.generator.manual_seed(0)
        method.state.forget()
        try:
            return method.predict(self.images).labels.cpu()
        finally:
            method.state.put_back(held)
