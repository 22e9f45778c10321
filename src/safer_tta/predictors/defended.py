"""The model behind one fixed transform: the simple defences that SAFER is compared with.

JPEG at quality 50, a low-pass that keeps half the spectrum, a slight Gaussian blur; each on every batch.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._internal.registry import Registry
from ..models import Classifier
from ..views import OPERATORS, Draw
from .base import Predictor
from .registry import register

TRANSFORMS: Registry[Callable[[Tensor], Tensor]] = Registry("transform")


class Defended(Predictor):
    """Ask the model behind one fixed transform of the images: `jpeg`, `fft` or `blur`."""

    channels = frozenset([1, 3])

    def __init__(self, classifier: Classifier | nn.Module, transform: str = "jpeg", *, seed: int | None = None) -> None:
        super().__init__(classifier, seed=seed)
        self.transform = transform
        self._function = TRANSFORMS.find(transform)

    @property
    def versions(self) -> dict[str, int]:
        return {"operator fft_low_pass": OPERATORS["fft_low_pass"].version} if self.transform == "fft" else {}

    def __repr__(self) -> str:
        return f"Defended(transform={self.transform!r})"

    def make_views(self, images: Tensor, draw: Draw) -> Tensor:
        return self._function(images)[None]


@TRANSFORMS.register("fft")
def low_pass(images: Tensor) -> Tensor:
    return OPERATORS["fft_low_pass"](images, torch.full((len(images),), 0.5))


@TRANSFORMS.register("blur")
def blur(images: Tensor) -> Tensor:
    """Blur with a 5×5 Gaussian of σ 0.5 and zeros outside the image."""
    line = torch.exp(-(torch.arange(-2.0, 3.0) ** 2) / (2 * 0.5**2))
    kernel = torch.outer(line, line) / line.sum() ** 2
    channels = images.shape[1]
    weight = kernel.to(images).expand(channels, 1, 5, 5)
    return F.conv2d(images, weight, padding=2, groups=channels)


@TRANSFORMS.register("jpeg")
def jpeg(images: Tensor) -> Tensor:
    """Baseline JPEG at quality 50, chroma halved both ways, with the gradient of the identity.

    The arithmetic of the codec without its lossless part, so that it runs batched on any device and needs no codec.
    """
    with torch.no_grad():
        # A grey image has the luminance of a colour image with three equal channels, and no colour differences.
        coded = _jpeg(images.detach().float().expand(-1, 3, -1, -1))[:, : images.shape[1]]
    return images + (coded.to(images.dtype) - images).detach()


# The standard's example tables (ITU-T T.81, annex K); quality 50 uses them unscaled.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)


def _jpeg(images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, -width % 16, 0, -height % 16), mode="replicate")
    red, green, blue = (padded * 255).round().unbind(1)
    luma = (0.299 * red + 0.587 * green + 0.114 * blue).round()
    blues = (128 - 0.168736 * red - 0.331264 * green + 0.5 * blue).round()
    reds = (128 + 0.5 * red - 0.418688 * green - 0.081312 * blue).round()
    luma = _quantise(luma, _LUMINANCE)
    blues, reds = (_quantise(F.avg_pool2d(chroma[:, None], 2)[:, 0].round(), _CHROMINANCE) for chroma in (blues, reds))
    blues, reds = (
        F.interpolate(chroma[:, None], scale_factor=2, mode="bilinear", align_corners=False)[:, 0] - 128
        for chroma in (blues, reds)
    )
    decoded = torch.stack([luma + 1.402 * reds, luma - 0.344136 * blues - 0.714136 * reds, luma + 1.772 * blues], dim=1)
    return decoded[..., :height, :width].round().clamp(0, 255) / 255


def _quantise(plane: Tensor, table: tuple[tuple[int, ...], ...]) -> Tensor:
    """Round the cosine transform of the 8×8 blocks of (B,H,W) to the table's steps, and transform it back."""
    batch, height, width = plane.shape
    cosine = _cosine_transform().to(plane)
    steps = torch.tensor(table, device=plane.device, dtype=plane.dtype)
    blocks = (plane - 128).view(batch, height // 8, 8, width // 8, 8).transpose(2, 3)
    coefficients = (cosine @ blocks @ cosine.T / steps).round() * steps
    blocks = cosine.T @ coefficients @ cosine
    return (blocks.transpose(2, 3).reshape(batch, height, width) + 128).round().clamp(0, 255)


@functools.cache
def _cosine_transform() -> Tensor:
    """The orthonormal 8-point DCT-II."""
    place = torch.arange(8.0)
    matrix = torch.cos(math.pi * (2 * place[None] + 1) * place[:, None] / 16) / 2
    matrix[0] /= math.sqrt(2)
    return matrix


for _name in TRANSFORMS:
    register(_name)(functools.partial(Defended, transform=_name))
