"""Images, labels and gradients for tests of attacks."""

from collections.abc import Callable

import torch
from torch import nn

from tests.conftest import CLASSES
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
