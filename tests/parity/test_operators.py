"""Every operator against a straight-line float64 version of its definition: one image, one pixel at a time."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from safer_tta.predictors import TRANSFORMS
from safer_tta.views import OPERATORS, Pipeline, operators
from tests.conftest import SMOOTHING, needs_pacs, photographs
from tests.contract.parts import generator

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
    "flip": lambda x, mirrored: x[..., ::-1] if mirrored else x,
}
OURS = {"flip"}  # not among the paper's sixteen


def compare(name: str, images: torch.Tensor) -> None:
    values = OPERATORS[name].sample(len(images), generator(7))
    ours = OPERATORS[name](images, values).double().numpy()
    parameters = [None] * len(images) if values is None else values.tolist()
    for image, parameter, out in zip(images.double().numpy(), parameters, ours, strict=True):
        expected = np.clip(REFERENCES[name](image, parameter), 0, 1)
        near = np.abs(out - expected) <= 1e-4
        assert near.mean() >= (0.995 if name in GEOMETRIC else 1.0), (name, parameter, near.mean())


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("shape", [(32, 32), (33, 26)], ids=["even", "odd"])
def test_random_images(name, shape):
    compare(name, torch.rand(6, 3, *shape, generator=generator(3)))


@needs_pacs
@pytest.mark.parametrize("name", REFERENCES)
def test_real_images(name):
    compare(name, photographs())


def test_every_operator_is_compared():
    assert set(OPERATORS) == {*REFERENCES, "gaussian_noise"}


def test_noise_has_the_level_of_each_image():
    images = torch.full((3, 3, 64, 64), 0.5)
    values = torch.tensor([0.01, 0.05, 0.10])
    noise = OPERATORS["gaussian_noise"](images, values, generator=generator()) - 0.5
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
    images = torch.rand(2, 3, 8, 8, generator=generator()).requires_grad_(True)
    OPERATORS[name](images, OPERATORS[name].sample(2)).sum().backward()
    assert torch.equal(images.grad, torch.ones_like(images))


def test_all_ways_to_blur_are_the_same_blur():
    """A GPU multiplies with matrices, a CPU convolves, a compiler sums; each is what the others would have given."""
    images = torch.rand(3, 3, 20, 31, dtype=torch.float64, generator=generator())
    kernels = operators._kernels(torch.tensor([1.0, 2.0, 3.0]), images)
    one = operators._blur_by_convolution(images, kernels)
    for blur in (operators._blur_by_matrices, operators._blur_by_sums):
        torch.testing.assert_close(blur(images, kernels), one, rtol=0, atol=1e-12)


RANGES = {
    "gaussian_blur": (1, 3),
    "gaussian_noise": (0.01, 0.10),
    "fft_low_pass": (0.2, 0.6),
    "solarize": (0.1, 0.9),
    **dict.fromkeys(("contrast", "brightness", "saturation"), (0.4, 1.6)),
    "sharpness": (0, 10),
    **dict.fromkeys(("shear_x", "shear_y"), (-20, 20)),
    **dict.fromkeys(("translate_x", "translate_y"), (-0.2, 0.2)),
    "rotate": (-30, 30),
}


@pytest.mark.parametrize("name", RANGES)
def test_parameters_fill_their_range(name):
    low, high = RANGES[name]
    values = (OPERATORS[name].sample(4000, generator()) - low) / (high - low)
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() <= 1
    assert values.quantile(0.5).item() == pytest.approx(0.5, abs=0.05), "uniform"


def test_other_parameters():
    assert set(OPERATORS) - set(RANGES) == {"equalize", "invert", "posterize", "flip"}
    assert OPERATORS["flip"].sample(4000, generator()).double().mean() == pytest.approx(0.5, abs=0.03)
    assert OPERATORS["equalize"].sample(9) is OPERATORS["invert"].sample(9) is None
    assert set(OPERATORS["posterize"].sample(200, generator()).tolist()) == {2, 3, 4, 5}


def drawn_names(preset: str, draws: int = 600) -> list[tuple[str, ...]]:
    return list(Pipeline(preset).draw(draws, 1, generator()).names)


def test_released_pipelines_are_noise_then_smoothing_then_any_other():
    assert Pipeline() == Pipeline("released", max_operators=3)
    firsts, seconds, thirds = (set(names) for names in zip(*drawn_names("released"), strict=True))
    assert firsts == {"gaussian_noise"}
    assert seconds == SMOOTHING
    assert thirds == set(OPERATORS) - OURS - {"gaussian_noise"}, "the other smoothing operator included"


def test_paper_pipelines_are_in_any_order_and_noise_is_not_forced():
    drawn = drawn_names("paper")
    assert all(SMOOTHING & set(names) for names in drawn)
    assert all(set(at) == set(OPERATORS) - OURS for at in zip(*drawn, strict=True)), "anything comes anywhere"
    noisy = sum("gaussian_noise" in names for names in drawn) / len(drawn)
    assert noisy == pytest.approx(2 / 15, abs=0.05), "two of the fifteen that are not the forced smoothing"


def test_gentle_pipelines_are_noise_smoothing_something_harmless_and_mirrored():
    assert Pipeline("gentle") == Pipeline("gentle", max_operators=4)
    drawn = drawn_names("gentle")
    firsts, seconds, thirds, lasts = (set(names) for names in zip(*drawn, strict=True))
    assert (firsts, seconds, lasts) == ({"gaussian_noise"}, SMOOTHING, {"flip"})
    assert thirds == {
        "brightness", "contrast", "saturation", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
    }  # fmt: skip
    assert max(Counter(names[2] for names in drawn).values()) < 2 * 600 / 8, "one as often as another"


@pytest.mark.parametrize("preset", ["released", "paper", "gentle"])
def test_every_image_of_every_view_has_parameters_of_its_own(preset):
    pipelines = Pipeline(preset).draw(40, 8, generator()).pipelines
    drawn: dict[str, list[float]] = {}
    for step in (step for pipeline in pipelines for step in pipeline if step.name in RANGES):
        drawn.setdefault(step.name, []).extend(step.values.tolist())
    assert all(len(set(values)) == len(values) for values in drawn.values())


def test_every_image_of_every_view_has_noise_of_its_own():
    images = torch.full((4, 3, 32, 32), 0.5)
    pipelines = Pipeline().draw(4, len(images), generator()).pipelines
    noise = torch.cat([pipeline[0](images) - images for pipeline in pipelines]).flatten(1)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.1


def slight_blur(x):
    """5×5 Gaussian of σ 0.5, zeros outside."""
    kernel = np.array([[math.exp(-(s**2 + t**2) / (2 * 0.5**2)) for t in range(-2, 3)] for s in range(-2, 3)])
    padded, out = np.pad(x, ((0, 0), (2, 2), (2, 2))), np.zeros_like(x)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            out[:, i, j] = (padded[:, i : i + 5, j : j + 5] * kernel / kernel.sum()).sum(axis=(1, 2))
    return out


@pytest.mark.parametrize(("name", "by_hand"), [("fft", lambda x: fft_low_pass(x, 0.5)), ("blur", slight_blur)])
def test_single_transforms(name, by_hand):
    images = torch.rand(3, 3, 21, 32, generator=generator())
    expected = np.stack([np.clip(by_hand(image), 0, 1) for image in images.double().numpy()])
    assert TRANSFORMS[name](images).numpy() == pytest.approx(expected, abs=1e-4)
