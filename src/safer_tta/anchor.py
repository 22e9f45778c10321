"""The first images of a stream and what was said of them: what a method must still know after it has learnt on.

A collapse shows in the answers themselves. Slow drift does not: a method that learns from noise may keep its answers
spread over all classes while it forgets every one of them. What it says of images it has answered before shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .methods import Method


class Anchor:
    """At most `size` images, kept as 8-bit on the CPU, and the answers they got."""

    def __init__(self, size: int = 128) -> None:
        self.size = size
        self.images: Tensor | None = None
        self.labels = torch.empty(0, dtype=torch.long)

    def offer(self, images: Tensor, method: Method) -> None:
        """Take images in while there is room. One image size only: they make one batch and are answered as one, since
        under batch statistics an answer depends on the images beside it."""
        chosen = images.detach()[: self.size - len(self.labels)].cpu()
        if not len(chosen) or (self.images is not None and chosen.shape[1:] != self.images.shape[1:]):
            return
        if chosen.is_floating_point():
            chosen = (chosen.clamp(0, 1) * 255).round().to(torch.uint8)
        self.images = chosen if self.images is None else torch.cat([self.images, chosen])
        self.labels = self._answers(method)

    def agreement(self, method: Method) -> float:
        """The share of the images that the method, as it stands, answers as they were answered first."""
        if self.images is None:
            return 1.0
        return float((self._answers(method) == self.labels).float().mean())

    def _answers(self, method: Method) -> Tensor:
        """Always under the same draw of views, so that states are compared and not their luck."""
        assert self.images is not None
        held = method.state.hold()
        method.state.generator.manual_seed(0)
        try:
            return method.predict(self.images).labels.cpu()
        finally:
            method.state.put_back(held)
