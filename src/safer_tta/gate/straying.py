"""How far the original view of an image strays from its augmented views: the evidence of SAFER-G, the gate.

Only ratios of distances between the views of one image count. So features need no common scale, and it does not matter
whether the images of a stream look alike. What a ratio is expected to be comes from the last 64 images. A larger batch
is judged by itself; a smaller one is completed by sums over the images before it, which fade as new ones come.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 1e-6
TINY = 1e-30  # for features that are all zero
WINDOW = 64  # images that an image is compared with
FEW = 16  # images from which expectations can be told; the evidence of fewer counts in proportion


class Recent(NamedTuple):
    """What the images before a batch left: their number, and sums over augmented views."""

    images: Tensor  # scalar
    line: Tensor  # (4,), sums of o, a, o² and o·a
    squares: Tensor  # (2,), of the residuals of augmented views

    @classmethod
    def of(cls, memory: Tensor) -> "Recent":
        """Read it from the numbers that `pack` made."""
        return cls(memory[0], memory[1:5], memory[5:])

    def pack(self) -> Tensor:
        """Return it as one tensor."""
        return torch.cat([self.images[None], self.line, self.squares])


SIZE = 7  # how many numbers `pack` returns


def evidence(features: Tensor, window: Recent | None = None) -> tuple[Tensor, Recent]:
    """Return by how many standard deviations every original strays too far, (B,), and the window with this batch.

    The mean of two comparisons: with how far the augmented views of the same image stray from each other, and with how
    far an augmented view would be expected to stray in the original's place. The latter is read off a line through all
    augmented views of the window, since the few views of one image say little.

    Args:
        features: Of every view, (V,B,d).
        window: What the images before this batch left; None for none.
    """
    z = features.to(torch.promote_types(features.dtype, torch.float32))
    before = Recent.of(z.new_zeros(SIZE)) if window is None else window
    kept = max(0.0, 1 - z.shape[1] / WINDOW)  # the share of the window that this batch leaves to those before it
    images = before.images * kept + z.shape[1]
    floor = (FLOOR * z.square().mean(dim=(0, 2))).clamp_min(TINY)
    original, augmented, others = straying(view_distances(z), floor)
    sums = torch.stack([others.sum(), augmented.sum(), others.square().sum(), (others * augmented).sum()])
    line = sums + kept * before.line
    views = images * len(augmented)
    mean_others, mean_augmented = line[0] / views, line[1] / views
    covariance = line[3] - line[1] * mean_others
    slope = (covariance / (line[2] - line[0] * mean_others + FLOOR)).clamp(0, 1)
    expected = mean_augmented + slope * (others - mean_others)
    residuals = torch.stack([(augmented - others).square().sum(), (augmented - expected).square().sum()])
    squares = residuals + kept * before.squares
    by_view, by_line = (squares / views).sqrt().clamp_min(FLOOR)
    found = ((original - others).mean(dim=0) / by_view + (original - expected).mean(dim=0) / by_line) / 2
    return found * (images / FEW).clamp(max=1), Recent(images, line, squares)


def straying(distance: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three logarithms of mean distances, each (V-1,B), with each augmented view left out in turn.

    How far the original is from the other views, how far the view left out is from them, and how far they are from
    each other; from distances (V,V,B) between the views of every image. floor: What is added to every mean, (B,), since
    views may be alike.
    """
    count = len(distance) - 1
    to_augmented = distance[:, 1:].sum(dim=1)
    among_all = to_augmented[1:].sum(dim=0) / 2
    others = (among_all - to_augmented[1:]) / ((count - 1) * (count - 2) / 2)
    original = (to_augmented[0] - distance[0, 1:]) / (count - 1)
    augmented = to_augmented[1:] / (count - 1)
    return (original + floor).log(), (augmented + floor).log(), (others + floor).log()


def view_distances(z: Tensor) -> Tensor:
    """Return mean squared distances (V,V,B) between the views (V,B,d) of every image."""
    z = z.transpose(0, 1)
    products = z @ z.transpose(1, 2) / z.shape[2]
    lengths = products.diagonal(dim1=1, dim2=2)
    return (lengths[:, :, None] + lengths[:, None] - 2 * products).clamp_min(0).permute(1, 2, 0)
