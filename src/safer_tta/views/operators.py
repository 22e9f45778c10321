"""The sixteen operators of the paper and one more, batched: one call on (B,3,H,W) with one parameter for each image.

`OPERATORS[name].sample(n, generator)` draws parameters and `OPERATORS[name](images, values)` applies them. Images are
in [0,1] before and after. Parameters live on the CPU, so that a draw can be replayed on any device; kernels, matrices
and masks are made of them there. Posterize and equalize are step functions, which pass gradients straight through:
without gradients, attacks through the views would fail and robustness would be overstated.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .._internal.compiling import compile_function
from .._internal.registry import Registry
from ..errors import InvalidValueError

Sampler = Callable[[int, Generator | None], Tensor]
Preparation = Callable[[Tensor, Tensor], Tensor]


def _beside_pixels(values: Tensor, images: Tensor) -> Tensor:
    """Shape one value per image so that it multiplies images."""
    return values.view(-1, 1, 1, 1)


@dataclass(frozen=True)
class Operator:
    """A function of images, of what is prepared from their values, and of noise if it is random."""

    name: str  # the name it is registered under
    function: Callable[..., Tensor]  # maps images in [0,1] to images; the result is clamped to [0,1]
    sampler: Sampler | None = None  # draws one value for each image; None if the operator has no parameter
    # makes one tensor for the function from the values and the images (their shape and precision)
    prepare: Preparation = _beside_pixels
    smoothing: bool = False  # whether it removes high frequencies; every view has at least one such operator
    random: bool = False  # whether the function needs noise of the images' shape
    drawn: bool = True  # whether presets that draw from all operators draw it too
    version: int = 1  # raised when its result changes; a part of the names of runs

    def sample(self, n: int, generator: Generator | None = None) -> Tensor | None:
        """Draw one parameter for each of n images; None if the operator has no parameter."""
        return None if self.sampler is None else self.sampler(n, generator)

    def __call__(
        self,
        images: Tensor,
        values: Tensor | None = None,
        *,
        generator: Generator | Sequence[Generator] | None = None,
        out: Tensor | None = None,
        compile: bool = False,
    ) -> Tensor:
        """Apply the operator to images (B,3,H,W) in [0,1], with a value for each image unless it has no parameter.

        Noise comes from one generator, or from several for equal parts of the batch.
        """
        self._check(images, values)
        dtype = torch.promote_types(images.dtype, torch.float32)
        arguments = []
        if values is not None:
            arguments.append(self.prepare(values, images).to(images.device, dtype, non_blocking=True))
        if self.random:
            arguments.append(_noise(images, generator, dtype))
        if compile:
            out = torch.empty_like(images) if out is None else out
            _program(self.name)(images, arguments, out)
            return out
        y = self.function(_to_single(images), *arguments)
        if out is None:
            return y.clamp(0, 1).to(images.dtype)
        return torch.clamp(y, 0, 1, out=out) if out.dtype == y.dtype else out.copy_(y.clamp(0, 1))

    def _check(self, images: Tensor, values: Tensor | None) -> None:
        if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
            raise InvalidValueError(
                f"{self.name} received {images.dtype} of shape {tuple(images.shape)}; expected floats (B,3,H,W) or "
                "(B,1,H,W)"
            )
        came = values if values is None else tuple(getattr(values, "shape", ())) or type(values).__name__
        if came != (None if self.sampler is None else (len(images),)):
            wanted = "no values" if self.sampler is None else f"one value per image ({len(images)},)"
            raise InvalidValueError(
                f"{self.name} received values {came}; expected {wanted}, as OPERATORS[name].sample draws"
            )


def _noise(images: Tensor, generator: Generator | Sequence[Generator] | None, dtype: torch.dtype) -> Tensor:
    parts = generator if isinstance(generator, Sequence) else [generator]
    shape = len(images) // len(parts), *images.shape[1:]
    drawn = [torch.randn(shape, generator=part, device=images.device, dtype=dtype) for part in parts]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


OPERATORS: Registry[Operator] = Registry("operator", Operator)
register = OPERATORS.register


@functools.cache
def _program(name: str) -> Callable[[Tensor, list[Tensor], Tensor], None]:
    """Compile an operator together with its clamp, so that the result is written in one pass."""
    function = OPERATORS[name].function

    def apply(images: Tensor, arguments: list[Tensor], out: Tensor) -> None:
        out.copy_(function(_to_single(images), *arguments).clamp(0, 1))

    return compile_function(apply)


def _to_single(images: Tensor) -> Tensor:
    """Return images in single precision at least."""
    return images.float() if images.dtype in (torch.bfloat16, torch.float16) else images


def uniform(low: float, high: float) -> Sampler:
    """Return a sampler of numbers from `low` to `high`."""
    return lambda n, generator: torch.rand(n, generator=generator) * (high - low) + low


def integers(low: int, high: int) -> Sampler:
    """Return a sampler of whole numbers from `low` to `high`."""
    return lambda n, generator: torch.randint(low, high + 1, (n,), generator=generator)


def _straight_through(x: Tensor, y: Tensor) -> Tensor:
    """Return the value of y with the gradient of x."""
    return x + (y - x).detach() if x.requires_grad else y


def grey(images: Tensor) -> Tensor:
    """Return the luminance (B,1,H,W) of images; grey ones are their own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


# --- smoothing and frequency ---------------------------------------------------------------------------------------

KERNEL = 9


@functools.lru_cache(maxsize=16)
def _reflected_taps(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return (9, side*side): for each tap of the kernel, the matrix that fetches this neighbour, reflected."""
    half = KERNEL // 2
    target = torch.arange(side)
    taps = torch.zeros(KERNEL, side, side, dtype=dtype)
    for tap in range(KERNEL):
        source = (target + tap - half).abs() % max(1, 2 * (side - 1))
        source = torch.where(source >= side, 2 * (side - 1) - source, source)
        taps[tap, source, target] = 1
    return taps.flatten(1).to(device)


def _kernels(sigma: Tensor, images: Tensor) -> Tensor:
    """Return the weights (B,9) of a blur, in single precision at least."""
    sigma = sigma.to(torch.promote_types(images.dtype, torch.float32))
    distance = torch.arange(KERNEL, device=sigma.device, dtype=sigma.dtype) - KERNEL // 2
    kernels = torch.exp(-(distance**2) / (2 * sigma[:, None] ** 2))
    return kernels / kernels.sum(dim=1, keepdim=True)


@register("gaussian_blur", sampler=uniform(1.0, 3.0), prepare=_kernels, smoothing=True)
def gaussian_blur(images: Tensor, kernels: Tensor) -> Tensor:
    if min(images.shape[2:]) <= KERNEL // 2:
        return _blur_by_matrices(images, kernels)
    if torch.compiler.is_compiling():
        return _blur_by_sums(images, kernels)
    return _blur_by_matrices(images, kernels) if images.is_cuda else _blur_by_convolution(images, kernels)


def _blur_by_sums(images: Tensor, kernels: Tensor) -> Tensor:
    """Blur by a weighted sum of nine shifted images along each axis: the fastest way when it is compiled."""
    height, width = images.shape[2:]
    padded = F.pad(images, (KERNEL // 2,) * 4, mode="reflect")
    weights = kernels.view(-1, KERNEL, 1, 1, 1).unbind(1)
    rows = functools.reduce(torch.add, [w * padded[..., tap : tap + width] for tap, w in enumerate(weights)])
    return functools.reduce(torch.add, [w * rows[..., tap : tap + height, :] for tap, w in enumerate(weights)])


def _blur_by_convolution(images: Tensor, kernels: Tensor) -> Tensor:
    """Blur by convolutions in which every channel of every image is a group: the fastest way on a CPU."""
    batch, channels, height, width = images.shape
    groups, half = batch * channels, KERNEL // 2
    padded = F.pad(images, (half,) * 4, mode="reflect").reshape(1, groups, height + 2 * half, width + 2 * half)
    each = kernels.repeat_interleave(channels, dim=0)
    rows = F.conv2d(padded, each.view(groups, 1, 1, KERNEL), groups=groups)
    return F.conv2d(rows, each.view(groups, 1, KERNEL, 1), groups=groups).view_as(images)


def _blur_by_matrices(images: Tensor, kernels: Tensor) -> Tensor:
    """Blur by a product with a banded matrix along each axis: the fastest way on a GPU, and for images of any size."""
    batch, channels, height, width = images.shape
    rows = images.reshape(batch, channels * height, width) @ _blur_matrix(kernels, width)
    columns = _blur_matrix(kernels, height).transpose(1, 2).unsqueeze(1)
    return columns @ rows.view(batch, channels, height, width)


def _blur_matrix(kernels: Tensor, side: int) -> Tensor:
    """Return the banded matrices (B,side,side) of a blur."""
    return (kernels @ _reflected_taps(side, kernels.device, kernels.dtype)).view(-1, side, side)


def _boxes(keep: Tensor, images: Tensor) -> Tensor:
    """Return (B,4): the first row of the shifted spectrum to keep, the first to drop after it, and so for columns."""
    sides = torch.tensor(images.shape[2:], dtype=torch.float64, device=keep.device)
    # A ratio of 0.2 is 0.200000003 in single precision, which must not keep one line more.
    kept = torch.ceil(keep.double()[:, None] * sides - 1e-6).clamp_min(1)
    first = torch.div(sides - kept, 2, rounding_mode="floor")
    return torch.stack([first, first + kept], dim=2).flatten(1)


@register("fft_low_pass", sampler=uniform(0.2, 0.6), prepare=_boxes, smoothing=True)
def fft_low_pass(images: Tensor, boxes: Tensor) -> Tensor:
    """Keep a box of the shifted spectrum, by the symmetric mask (M(f) + M(-f)) / 2, which gives the same real part."""
    height, width = images.shape[-2:]
    half = width // 2 + 1
    rows, rows_mirrored = _masks(boxes[:, :2], height)
    columns, columns_mirrored = _masks(boxes[:, 2:], width)
    mask = rows[:, :, None] * columns[:, None, :half] + rows_mirrored[:, :, None] * columns_mirrored[:, None, :half]
    spectrum: Tensor = torch.fft.rfft2(images) * (mask / 2)[:, None]
    filtered: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return filtered


def _masks(box: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return masks (B,side) of the kept frequencies f and of -f, in the order of the unshifted spectrum."""
    frequency = torch.arange(side, device=box.device)
    places = torch.stack([frequency, -frequency]) + side // 2  # the places of f and -f in the shifted spectrum
    places = places % side
    kept = (places >= box[:, 0, None, None]) & (places < box[:, 1, None, None])
    mask, mirrored = kept.to(box.dtype).unbind(1)
    return mask, mirrored


@register("gaussian_noise", sampler=uniform(0.01, 0.10), random=True)
def gaussian_noise(images: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    return images + sigma * noise


# --- photometric ---------------------------------------------------------------------------------------------------


@register("equalize")
def equalize(images: Tensor) -> Tensor:
    flat = images.detach().flatten(2)
    counts = torch.zeros(*flat.shape[:2], 256, device=flat.device, dtype=torch.float32)
    counts.scatter_add_(
        2, (flat * 256).long().clamp_(0, 255), torch.ones((), device=flat.device, dtype=counts.dtype).expand_as(flat)
    )
    cdf = counts.cumsum(2)
    first = torch.where(cdf > 0, cdf, torch.inf).amin(2, keepdim=True)  # the cdf at the first bin that is not empty
    spread = flat.shape[2] - first
    table = ((cdf - first) / spread.clamp_min(1)).to(flat.dtype)
    looked_up = table.gather(2, (flat * 255).round().long().clamp_(0, 255))
    equalized = torch.where(spread > 0, looked_up, flat)  # a channel with one bin stays the same
    return _straight_through(images, equalized.view_as(images).clamp(0, 1))


@register("invert")
def invert(images: Tensor) -> Tensor:
    return 1 - images


@register("solarize", sampler=uniform(0.1, 0.9))
def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images < threshold, images, 1 - images)


@register("posterize", sampler=integers(2, 5), prepare=lambda bits, images: (2**bits - 1).view(-1, 1, 1, 1))
def posterize(images: Tensor, levels: Tensor) -> Tensor:
    return _straight_through(images, torch.floor(images * levels) / levels)


@register("contrast", sampler=uniform(0.4, 1.6))
def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images).mean(dim=(1, 2, 3), keepdim=True), images, factor)


@register("brightness", sampler=uniform(0.4, 1.6))
def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return images * factor


@register("saturation", sampler=uniform(0.4, 1.6))
def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images), images, factor)


@register("sharpness", sampler=uniform(0.0, 10.0))
def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = images[..., 1:-1, 1:-1]
    sharpened = images.clone()  # at the border the smoothed image is the image itself
    sharpened[..., 1:-1, 1:-1] = torch.lerp((box + 4 * inner) / 13, inner, factor)
    return sharpened


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return base * (1 - factor) + images * factor


# --- geometric: nearest neighbour, black outside ------------------------------------------------------------------


Matrix = list[list[Tensor | float]]


def _warp(images: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _fetch_from(matrix: Callable[[Tensor, torch.Size], Matrix]) -> Preparation:
    """Prepare matrices (B,2,3) for grid_sample, in half sides, from those in pixels from the centre, y downwards."""

    def prepare(values: Tensor, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        (a, b, c), (d, e, f) = matrix(values.double(), images.shape)
        scaled = [a, b * (height / width), c * (2 / width), d * (width / height), e, f * (2 / height)]
        theta = values.new_empty(len(values), 6, dtype=torch.float64)
        for column, value in enumerate(scaled):
            theta[:, column] = value
        return theta.view(-1, 2, 3)

    return prepare


def _tangent(degrees: Tensor) -> Tensor:
    return torch.tan(torch.deg2rad(degrees))


def _rotation(degrees: Tensor, shape: torch.Size) -> Matrix:
    angle = torch.deg2rad(degrees)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    return [[cosine, -sine, 0.0], [sine, cosine, 0.0]]


@register(
    "shear_x",
    sampler=uniform(-20.0, 20.0),
    prepare=_fetch_from(lambda d, shape: [[1.0, _tangent(d), 0.0], [0.0, 1.0, 0.0]]),
)
def shear_x(images: Tensor, theta: Tensor) -> Tensor:
    return _warp(images, theta)


@register(
    "shear_y",
    sampler=uniform(-20.0, 20.0),
    prepare=_fetch_from(lambda d, shape: [[1.0, 0.0, 0.0], [_tangent(d), 1.0, 0.0]]),
)
def shear_y(images: Tensor, theta: Tensor) -> Tensor:
    return _warp(images, theta)


@register(
    "translate_x",
    sampler=uniform(-0.2, 0.2),
    prepare=_fetch_from(lambda share, shape: [[1.0, 0.0, -torch.round(share * shape[3])], [0.0, 1.0, 0.0]]),
)
def translate_x(images: Tensor, theta: Tensor) -> Tensor:
    return _warp(images, theta)


@register(
    "translate_y",
    sampler=uniform(-0.2, 0.2),
    prepare=_fetch_from(lambda share, shape: [[1.0, 0.0, 0.0], [0.0, 1.0, -torch.round(share * shape[2])]]),
)
def translate_y(images: Tensor, theta: Tensor) -> Tensor:
    return _warp(images, theta)


@register("rotate", sampler=uniform(-30.0, 30.0), prepare=_fetch_from(_rotation))
def rotate(images: Tensor, theta: Tensor) -> Tensor:
    return _warp(images, theta)


@register("flip", sampler=integers(0, 1), drawn=False)
def flip(images: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror images whose value is 1. It is not in the paper; SAFER-G uses it."""
    return torch.where(mirrored > 0, images.flip(-1), images)
