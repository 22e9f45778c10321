"""Images, labels and gradients for tests of attacks."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from tests.conftest import CLASSES, small_net
from tests.contract.parts import generator

EPS = 8 / 255
STEPS = {"eps": EPS, "step": 2 / 255, "steps": 3}
Scores = Callable[[torch.Tensor], torch.Tensor]


def eight_bit(seed: int = 0, size: int = 6, side: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (size, 3, side, side), generator=generator(seed), dtype=torch.uint8)


def labels(size: int = 6) -> torch.Tensor:
    return torch.arange(size) % CLASSES


def ascent(predict: Scores, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(nn.functional.cross_entropy(predict(x), y, reduction="sum"), x)[0]


def drawings(size: int = 40, side: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images of five patterns, as bytes, and the numbers of their patterns."""
    patterns = torch.rand(CLASSES, 3, 6, 6, generator=generator(99))
    y = torch.arange(size) % CLASSES
    noise = torch.randn(size, 3, side, side, generator=generator(seed))
    x = 0.35 + 0.3 * nn.functional.interpolate(patterns, size=side)[y] + 0.05 * noise
    return (x.clamp(0, 1) * 255).round().byte(), y


@functools.cache
def trained_net(seed: int = 0) -> nn.Module:
    """A small network that has learnt the patterns. Tests share it and must not change it."""
    return learnt(*drawings(seed=seed + 1), seed=seed)


def learnt(x: torch.Tensor, y: torch.Tensor, seed: int = 0) -> nn.Module:
    """A small network that has learnt these images."""
    model = small_net(seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of the dropout
        for _ in range(120):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x / 255), y).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model.eval()
