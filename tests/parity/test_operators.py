"""Every operator against a straight-line float64 version of its definition: one image, one pixel at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from safer_tta.views import OPERATORS, operators
from tests.conftest import needs_pacs, photographs

GEOMETRIC = {"shear_x", "shear_y", "translate_x", "translate_y", "rotate", "equalize"}


def reflect(i: int, side: int) -> int:
    while not 0 <= i < side:
        i = -i if i < 0 else 2 * (side - 1) - i
    return i


def gaussian_blur(x, sigma):
    kernel = [math.exp(-(t**2) / (2 * sigma**2)) for t in range(-4, 5)]
    kernel = [k / sum(kernel) for k in kernel]
    _, height, width = x.shape
    across = np.zeros_like(x)
    for j in range(width):
        for t in range(9):
            across[:, :, j] += kernel[t] * x[:, :, reflect(j + t - 4, width)]
    out = np.zeros_like(x)
    for i in range(height):
        for t in range(9):
            out[:, i] += kernel[t] * across[:, reflect(i + t - 4, height)]
    return out


def fft_low_pass(x, keep):
    _, height, width = x.shape
    spectrum = np.fft.fftshift(np.fft.fft2(x), axes=(1, 2))
    mask = np.zeros((height, width))
    rows, columns = max(1, math.ceil(keep * height)), max(1, math.ceil(keep * width))
    top, left = (height - rows) // 2, (width - columns) // 2
    mask[top : top + rows, left : left + columns] = 1
    return np.fft.ifft2(np.fft.ifftshift(spectrum * mask, axes=(1, 2))).real


def equalize(x, _):
    out = np.empty_like(x)
    for c, plane in enumerate(x):
        histogram = np.zeros(256)
        for value in plane.ravel():
            histogram[min(255, math.floor(256 * value))] += 1
        cdf = np.cumsum(histogram)
        least = cdf[np.flatnonzero(histogram)[0]]
        for i, row in enumerate(plane):
            for j, value in enumerate(row):
                out[c, i, j] = (cdf[round(255 * value)] - least) / (plane.size - least)
    return out


def grey(x):
    return 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]


def sharpness(x, factor):
    out = x.copy()
    _, height, width = x.shape
    for i in range(1, height - 1):
        for j in range(1, width - 1):
            smooth = (x[:, i - 1 : i + 2, j - 1 : j + 2].sum(axis=(1, 2)) + 4 * x[:, i, j]) / 13
            out[:, i, j] = smooth + factor * (x[:, i, j] - smooth)
    return out


def posterize(x, bits):
    levels = 2**bits - 1
    return np.floor(x * levels) / levels


def fetch(x, source):
    """out(x, y) = in(source(x, y)), in pixels from the centre, y downwards."""
    _, height, width = x.shape
    out = np.zeros_like(x)
    for i in range(height):
        for j in range(width):
            u, v = source(j - (width - 1) / 2, i - (height - 1) / 2)
            column, row = round(u + (width - 1) / 2), round(v + (height - 1) / 2)
            if 0 <= row < height and 0 <= column < width:
                out[:, i, j] = x[:, row, column]
    return out


def rotate(image, degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return fetch(image, lambda x, y: (c * x - s * y, s * x + c * y))


REFERENCES = {
    "gaussian_blur": gaussian_blur,
    "fft_low_pass": fft_low_pass,
    "equalize": equalize,
    "invert": lambda x, _: 1 - x,
    "solarize": lambda x, t: np.where(x < t, x, 1 - x),
    "posterize": posterize,
    "contrast": lambda x, f: grey(x).mean() * (1 - f) + f * x,
    "brightness": lambda x, f: f * x,
    "saturation": lambda x, f: grey(x)[None] * (1 - f) + f * x,
    "sharpness": sharpness,
    "shear_x": lambda a, d: fetch(a, lambda x, y: (x + math.tan(math.radians(d)) * y, y)),
    "shear_y": lambda a, d: fetch(a, lambda x, y: (x, y + math.tan(math.radians(d)) * x)),
    "translate_x": lambda a, t: fetch(a, lambda x, y: (x - round(t * a.shape[2]), y)),
    "translate_y": lambda a, t: fetch(a, lambda x, y: (x, y - round(t * a.shape[1]))),
    "rotate": rotate,
}


def compare(name: str, images: torch.Tensor) -> None:
    values = OPERATORS[name].sample(len(images), torch.Generator().manual_seed(7))
    ours = OPERATORS[name](images, values).double().numpy()
    parameters = [None] * len(images) if values is None else values.tolist()
    for image, parameter, out in zip(images.double().numpy(), parameters, ours, strict=True):
        expected = np.clip(REFERENCES[name](image, parameter), 0, 1)
        near = np.abs(out - expected) <= 1e-4
        assert near.mean() >= (0.995 if name in GEOMETRIC else 1.0), (name, parameter, near.mean())


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [(32, 32), (33, 26)], ids=["even", "odd"])
def test_random_images(name, shape):
    compare(name, torch.rand(6, 3, *shape, generator=torch.Generator().manual_seed(3)))


@needs_pacs
@pytest.mark.parametrize("name", REFERENCES)
def test_real_images(name):
    compare(name, photographs())


def test_every_operator_is_compared():
    assert set(OPERATORS) == {*REFERENCES, "gaussian_noise"}


def test_noise_has_the_level_of_each_image():
    images = torch.full((3, 3, 64, 64), 0.5)
    values = torch.tensor([0.01, 0.05, 0.10])
    generator = torch.Generator().manual_seed(0)
    noise = OPERATORS["gaussian_noise"](images, values, generator=generator) - 0.5
    assert noise.flatten(1).std(dim=1).numpy() == pytest.approx(values.numpy(), rel=0.03)
    assert noise.mean().abs() < 1e-3


def test_rotation_turns_counter_clockwise():
    right = torch.zeros(1, 3, 9, 9)
    right[..., 4, 7] = 1  # a dot to the right of the centre
    up = OPERATORS["rotate"](right, torch.tensor([30.0]))
    row, _ = divmod(int(up[0, 0].argmax()), 9)
    assert row < 4


def test_translation_is_to_the_right_and_down():
    dot = torch.zeros(1, 3, 10, 10)
    dot[..., 5, 5] = 1
    assert OPERATORS["translate_x"](dot, torch.tensor([0.2]))[0, 0, 5, 7] == 1
    assert OPERATORS["translate_y"](dot, torch.tensor([0.2]))[0, 0, 7, 5] == 1


def test_equalize_leaves_a_constant_channel_alone():
    flat = torch.full((2, 3, 8, 8), 0.4)
    assert torch.equal(OPERATORS["equalize"](flat), flat)


@pytest.mark.parametrize("name", ["equalize", "posterize"])
def test_steps_pass_gradients_straight_through(name):
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    OPERATORS[name](images, OPERATORS[name].sample(2)).sum().backward()
    assert torch.equal(images.grad, torch.ones_like(images))


def test_all_ways_to_blur_are_the_same_blur():
    """A GPU multiplies with matrices, a CPU convolves, a compiler sums; each is what the others would have given."""
    images = torch.rand(3, 3, 20, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernels = operators._kernels(torch.tensor([1.0, 2.0, 3.0]), images)
    one = operators._blur_by_convolution(images, kernels)
    for blur in (operators._blur_by_matrices, operators._blur_by_sums):
        torch.testing.assert_close(blur(images, kernels), one, rtol=0, atol=1e-12)
