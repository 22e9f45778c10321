"""The views that methods make themselves against straight-line float64 versions: one image, one pixel at a time.

Both sides draw from generators of one seed, in the order in which the functions under test document their parts.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from safer_tta.methods._frame.augmentations import augmix, easy, strong
from safer_tta.methods._frame.policy import LIBRARY, Policy
from safer_tta.views.augment import turn_hue
from tests.parity.test_operators import REFERENCES, gaussian_blur

Image = np.ndarray


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def uniform(low: float, high: float, count: int, generator: torch.Generator) -> list[float]:
    return [low + (high - low) * x for x in torch.rand(count, generator=generator).tolist()]


def pictures(count: int, height: int = 20, width: int = 28) -> torch.Tensor:
    """Within the range, not filling it: else stretching to it would change nothing."""
    noise = torch.rand(count, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return 0.15 + 0.7 * noise


def window(x: Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image:
    """out(x, y) = in(a x + b y + c, d x + e y + f), in half sides from the centre; bilinear, mirrored outside."""
    _, height, width = x.shape
    out = np.zeros_like(x)
    for i, j in itertools.product(range(height), range(width)):
        across, down = (2 * j + 1) / width - 1, (2 * i + 1) / height - 1
        column = (width * (a * across + b * down + c + 1) - 1) / 2
        row = (height * (d * across + e * down + f + 1) - 1) / 2
        for near_row, near_column in itertools.product((0, 1), (0, 1)):
            at_row, at_column = math.floor(row) + near_row, math.floor(column) + near_column
            share = (1 - abs(row - at_row)) * (1 - abs(column - at_column))
            out[:, i, j] += share * x[:, mirror(at_row, height), mirror(at_column, width)]
    return out


def mirror(i: int, side: int) -> int:
    """Mirrored at the outer edge of the last pixel, which so comes twice."""
    while not 0 <= i < side:
        i = -1 - i if i < 0 else 2 * side - 1 - i
    return i


def cropped(images: list[Image], smallest: float, generator: torch.Generator) -> list[Image]:
    count, out = len(images), []
    area, ratio = uniform(smallest, 1, count, generator), uniform(-0.288, 0.288, count, generator)
    across, down = uniform(-1, 1, count, generator), uniform(-1, 1, count, generator)
    mirrored = mirrorings(count, generator)
    for b, image in enumerate(images):
        width = min(1, math.sqrt(area[b] * math.exp(ratio[b])))
        height = min(1, math.sqrt(area[b] / math.exp(ratio[b])))
        out.append(window(image, width * mirrored[b], 0, across[b] * (1 - width), 0, height, down[b] * (1 - height)))
    return out


def mirrorings(count: int, generator: torch.Generator) -> list[int]:
    return [-1 if x < 0.5 else 1 for x in torch.rand(count, generator=generator).tolist()]


def autocontrast(x: Image) -> Image:
    return np.stack([(plane - plane.min()) / (plane.max() - plane.min()) for plane in x])


def turned(x: Image, turns: float) -> Image:
    """Every colour about the grey axis, by Rodrigues' formula."""
    axis, angle = np.ones(3) / math.sqrt(3), 2 * math.pi * turns
    out = np.empty_like(x)
    for i, j in itertools.product(range(x.shape[1]), range(x.shape[2])):
        colour = x[:, i, j]
        along = axis * (axis @ colour)
        out[:, i, j] = along + math.cos(angle) * (colour - along) + math.sin(angle) * np.cross(axis, colour)
    return out


def near(ours: torch.Tensor, expected: list[Image], share: float = 1.0) -> bool:
    """To 1e-4, in as many pixels as the SPEC asks of operators: geometric ones and equalize may round differently."""
    return bool((np.abs(ours.numpy() - np.stack(expected)) <= 1e-4).mean() >= share)


def test_easy_views():
    images, generator = pictures(6), seeded()
    assert near(easy(images, seeded()), cropped(list(images.numpy()), 0.8, generator))


def test_half_of_the_easy_views_are_mirrored_and_none_leaves_out_more_than_a_fifth():
    ramp = torch.linspace(0, 1, 32).expand(400, 3, 32, 32)
    seen = easy(ramp, seeded())
    slope = seen[..., -1].mean(dim=(1, 2)) - seen[..., 0].mean(dim=(1, 2))
    assert 160 < int((slope < 0).sum()) < 240
    assert slope.abs().min() > 0.6  # 0.8 of the area, at most a third wider than high


def test_strong_views():
    images, generator = pictures(5), seeded()
    ours, count = strong(images, seeded()), len(images)
    factors = {
        "brightness": uniform(0.6, 1.4, count, generator),
        "contrast": uniform(0.7, 1.3, count, generator),
        "saturation": uniform(0.5, 1.5, count, generator),
    }
    hue, gamma = uniform(-0.06, 0.06, count, generator), uniform(0.7, 1.3, count, generator)
    angle, zoom = uniform(-15, 15, count, generator), uniform(0.9, 1.1, count, generator)
    mirrored = mirrorings(count, generator)
    across, down = uniform(-1 / 8, 1 / 8, count, generator), uniform(-1 / 8, 1 / 8, count, generator)
    sigma = uniform(0.05, 0.5, count, generator)
    noise = torch.randn(images.shape, generator=generator).numpy()
    expected = []
    for b, x in enumerate(images.numpy()):
        for name, values in factors.items():
            x = np.clip(REFERENCES[name](x, values[b]), 0, 1)
        x = np.clip(turned(x, hue[b]), 1e-6, 1) ** gamma[b]
        c, s = (f(math.radians(angle[b])) / zoom[b] for f in (math.cos, math.sin))
        ratio = x.shape[1] / x.shape[2]
        x = window(x, c * mirrored[b], -s * ratio, 2 * across[b], s * mirrored[b] / ratio, c, 2 * down[b])
        expected.append(np.clip(gaussian_blur(x, sigma[b]) + 0.005 * noise[b], 0, 1))
    assert near(ours, expected)


def test_a_third_of_a_turn_of_the_hue_swaps_the_channels():
    images = pictures(2)
    once = turn_hue(images, torch.tensor([1 / 3, -1 / 3]))
    torch.testing.assert_close(once[0], images[0].roll(1, dims=0), rtol=0, atol=1e-6)
    torch.testing.assert_close(once[1], images[1].roll(-1, dims=0), rtol=0, atol=1e-6)


def shifted(axis: int) -> Callable[[Image, float, float], Image]:
    name = ("translate_y", "translate_x")[axis]
    return lambda x, level, sign: REFERENCES[name](
        x, sign * math.floor(level * x.shape[1 + axis] / 30) / x.shape[1 + axis]
    )


def sheared(name: str) -> Callable[[Image, float, float], Image]:
    return lambda x, level, sign: REFERENCES[name](x, sign * math.degrees(math.atan(0.03 * level)))


# AugMix at severity 1, a level of ten being 30 degrees, a shear of 0.3, a third of the side, 256 grey values, 4 bits.
AUGMIX: list[Callable[[Image, float, float], Image]] = [
    lambda x, level, sign: autocontrast(x),
    lambda x, level, sign: REFERENCES["equalize"](x, None),
    lambda x, level, sign: REFERENCES["posterize"](x, 4),
    lambda x, level, sign: REFERENCES["solarize"](x, (256 - math.floor(25.6 * level)) / 256),
    lambda x, level, sign: REFERENCES["rotate"](x, sign * math.floor(3 * level)),
    sheared("shear_x"),
    sheared("shear_y"),
    shifted(1),
    shifted(0),
]


def chained(images: list[Image], generator: torch.Generator) -> list[Image]:
    count, images = len(images), list(images)
    depth = torch.randint(1, 4, (count,), generator=generator).tolist()
    for place in range(3):
        chosen = torch.randint(9, (count,), generator=generator).tolist()
        level, sign = uniform(0.1, 1, count, generator), torch.randint(2, (count,), generator=generator).tolist()
        for b in range(count):
            if place < depth[b]:
                images[b] = np.clip(AUGMIX[chosen[b]](images[b], level[b], 2 * sign[b] - 1), 0, 1)
    return images


def test_augmix():
    image, count, generator = pictures(1, 32, 40)[0], 8, seeded()
    copies = cropped([image.numpy()] * count, 0.08, generator)
    drawn = -torch.rand(count, 3, generator=generator).double().log().numpy()
    shares = drawn / drawn.sum(axis=1, keepdims=True)
    chains = [chained(copies, generator) for _ in range(3)]
    own = torch.rand(count, generator=generator).tolist()
    expected = []
    for b, copy in enumerate(copies):
        mixed = sum(shares[b, k] * chains[k][b] for k in range(3))
        expected.append(np.clip(own[b] * copy + (1 - own[b]) * mixed, 0, 1))
    assert near(augmix(image, count, seeded()), expected, share=0.98)


def signed(m: float, largest: float) -> float:
    """A magnitude of a half changes nothing, more and less go opposite ways."""
    return (2 * m - 1) * largest


def photometric(name: str, low: float, high: float) -> Callable[[Image, float], Image]:
    return lambda x, m: REFERENCES[name](x, low + m * (high - low))


def rotated(x: Image, m: float) -> Image:
    angle = signed(m, math.pi / 6)
    return window(x, math.cos(angle), -math.sin(angle), 0, math.sin(angle), math.cos(angle), 0)


POLICY: dict[str, Callable[[Image, float], Image]] = {  # in the SPEC's order
    "shear_x": lambda x, m: window(x, 1, signed(m, 0.3), 0, 0, 1, 0),
    "shear_y": lambda x, m: window(x, 1, 0, 0, signed(m, 0.3), 1, 0),
    "translate_x": lambda x, m: window(x, 1, 0, signed(m, 0.6), 0, 1, 0),
    "translate_y": lambda x, m: window(x, 1, 0, 0, 0, 1, signed(m, 0.6)),
    "contrast": photometric("contrast", 0.1, 1.9),
    "colour": photometric("saturation", 0.1, 1.9),
    "brightness": photometric("brightness", 0.1, 1.9),
    "sharpness": photometric("sharpness", 0.1, 1.9),
    "rotate": rotated,
    "autocontrast": lambda x, m: autocontrast(x),
    "invert": photometric("invert", 0, 0),
    "equalize": photometric("equalize", 0, 0),
    "solarize": photometric("solarize", 0, 1),
    "posterize": photometric("posterize", 4, 8),
}


def test_every_pair_of_the_policy():
    assert list(LIBRARY) == list(POLICY)
    policy, pairs = Policy(), torch.randperm(91, generator=seeded())
    with torch.no_grad():
        policy.strength.copy_(torch.randn(91, 2, generator=seeded()))
    strength = torch.sigmoid(policy.strength.detach()).tolist()
    images = pictures(1, 12, 12).expand(91, 3, 12, 12)
    ours = policy.apply_pairs(images, pairs).detach()
    names = list(itertools.combinations(POLICY, 2))
    for pair, x, out in zip(pairs.tolist(), images.numpy(), ours, strict=True):
        for name, m in zip(names[pair], strength[pair], strict=True):
            x = np.clip(POLICY[name](x, m), 0, 1)
        assert near(out[None], [x], share=0.98), names[pair]


@pytest.mark.parametrize("name", ["shear_x", "shear_y", "translate_x", "translate_y", "rotate"])
def test_magnitudes_go_both_ways(name):
    """From a half on, where nothing moves: what one side does to an image, the other does to its mirror image."""
    images = pictures(1, 16, 16)
    mirror = [3] if name.endswith(("_x", "rotate")) else [2]
    less, half, more = (LIBRARY[name](images, torch.tensor([m])) for m in (0.2, 0.5, 0.8))
    mirrored = LIBRARY[name](images.flip(mirror), torch.tensor([0.8])).flip(mirror)
    torch.testing.assert_close(half, images, rtol=0, atol=1e-6)
    torch.testing.assert_close(less, mirrored, rtol=0, atol=1e-6)
    assert (more - less).abs().max() > 0.1
