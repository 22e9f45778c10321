"""TeSLA's adversarial augmentation policy: which pair of operators, and how strong, makes a teacher least certain.

91 pairs of 14 operators; a learnable weight for choosing each pair and two learnable magnitudes in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from ...views.augment import autocontrast, warp
from ...views.operators import OPERATORS

Operator = Callable[[Tensor, Tensor], Tensor]


def _photometric(name: str, low: float, high: float) -> Operator:
    return lambda images, magnitude: OPERATORS[name](images, low + magnitude * (high - low))


def _signed(magnitude: Tensor, largest: float) -> Tensor:
    return (2 * magnitude - 1) * largest


def _affine(images: Tensor, **rows: Tensor) -> Tensor:
    """Warp images by (x, y) -> (a x + b y + c, d x + e y + f); bilinear, so that the magnitude has a gradient."""
    zero = torch.zeros(len(images))
    identity = {"a": zero + 1, "b": zero, "c": zero, "d": zero, "e": zero + 1, "f": zero}
    return warp(images, list({**identity, **rows}.values()))


def _rotate(images: Tensor, magnitude: Tensor) -> Tensor:
    angle = _signed(magnitude, math.pi / 6)
    return _affine(images, a=angle.cos(), b=-angle.sin(), d=angle.sin(), e=angle.cos())


LIBRARY: dict[str, Operator] = {
    "shear_x": lambda images, m: _affine(images, b=_signed(m, 0.3)),
    "shear_y": lambda images, m: _affine(images, d=_signed(m, 0.3)),
    "translate_x": lambda images, m: _affine(images, c=_signed(m, 0.6)),
    "translate_y": lambda images, m: _affine(images, f=_signed(m, 0.6)),
    "contrast": _photometric("contrast", 0.1, 1.9),
    "colour": _photometric("saturation", 0.1, 1.9),
    "brightness": _photometric("brightness", 0.1, 1.9),
    "sharpness": _photometric("sharpness", 0.1, 1.9),
    "rotate": _rotate,
    "autocontrast": lambda images, m: autocontrast(images),
    "invert": lambda images, m: OPERATORS["invert"](images),
    "equalize": lambda images, m: OPERATORS["equalize"](images),
    "solarize": _photometric("solarize", 0.0, 1.0),
    "posterize": _photometric("posterize", 4.0, 8.0),
}
PAIRS = torch.tensor(list(itertools.combinations(range(len(LIBRARY)), 2)))


class Policy(nn.Module):
    """Parameters on the CPU: they are few, and a draw from them is replayed on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Parameter(torch.zeros(len(PAIRS)))
        self.strength = nn.Parameter(torch.zeros(len(PAIRS), 2))

    def to(self, *_: object, **__: object) -> Policy:
        return self

    def draw(self, count: int, generator: Generator) -> Tensor:
        """A pair for each image, as the policy prefers them."""
        chances = self.choice.detach().softmax(dim=0)
        return torch.multinomial(chances, count, replacement=True, generator=generator)

    def draw_any(self, count: int, generator: Generator) -> Tensor:
        """A pair for each image, all alike."""
        return torch.randint(len(PAIRS), (count,), generator=generator)

    def apply_pairs(self, images: Tensor, pairs: Tensor) -> Tensor:
        """Pass every image through its pair of operators, with a gradient in their magnitudes."""
        magnitudes = torch.sigmoid(self.strength[pairs])
        for slot in range(2):
            chosen = PAIRS[pairs, slot]
            parts, places = [], []
            for index in sorted(set(chosen.tolist())):
                of = torch.nonzero(chosen == index).flatten()
                operator = list(LIBRARY.values())[index]
                parts.append(operator(images[of.to(images.device)], magnitudes[of, slot]).clamp(0, 1))
                places.append(of)
            back = torch.cat(places).argsort().to(images.device)
            images = torch.cat(parts)[back]
        return images
