"""The embedded data: four visual domains of seven shapes, drawn from a seed, with 64 pixels a side. No download.

A shape is a signed distance (negative inside), and a domain is a way to paint it. So all domains have the same seven
classes and differ only in style, as in PACS.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._internal import checks

Array = NDArray[np.floating[Any]]
Shape = Callable[[Array, Array], Array]
Painter = Callable[[Array, np.random.Generator], Array]

SIDE = 64
CLASSES = ("disc", "square", "triangle", "star", "cross", "ring", "heart")
DOMAINS = ("photo", "painting", "cartoon", "sketch")


def domain(name: str, count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return `count` images (count,3,64,64) of a domain and their labels, the classes in turn; `seed` decides them."""
    checks.one_of(DOMAINS, domain=name)
    labels = np.arange(count, dtype=np.int64) % len(CLASSES)
    images = np.stack([_image(name, int(label), seed, index) for index, label in enumerate(labels)])
    return images, labels


def _image(name: str, label: int, seed: int, index: int) -> NDArray[np.uint8]:
    # Every image has its own generator, so image 7 is the same whether 10 or 1,000 are drawn.
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, index])
    painted = PAINTERS[name](distance(SHAPES[CLASSES[label]], rng), rng)
    return to_uint8(painted)


def to_uint8(painted: Array) -> NDArray[np.uint8]:
    """Convert (H,W,3) in [0,1] to (3,H,W) bytes."""
    return (painted.clip(0, 1) * 255).round().astype(np.uint8).transpose(2, 0, 1)


# --- shapes: signed distances about the origin, of size about 1 -----------------------------------------------------


def _disc(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 0.85


def _square(x: Array, y: Array) -> Array:
    return np.maximum(abs(x), abs(y)) - 0.75


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(y - 0.5, 0.866 * abs(x) - 0.5 * y - 0.5)


def _star(x: Array, y: Array) -> Array:
    angle = np.mod(np.arctan2(x, -y) + np.pi / 5, 2 * np.pi / 5) - np.pi / 5
    radius = np.hypot(x, y)
    return np.float32(0.85) * (radius * np.cos(abs(angle) - 0.95) - 0.58).astype(np.float32)


def _cross(x: Array, y: Array) -> Array:
    across = np.maximum(abs(x) - 0.9, abs(y) - 0.3)
    return np.minimum(across, np.maximum(abs(x) - 0.3, abs(y) - 0.9))


def _ring(x: Array, y: Array) -> Array:
    return abs(np.hypot(x, y) - 0.65) - 0.22


def _heart(x: Array, y: Array) -> Array:
    lobes = np.hypot(abs(x) - 0.42, y + 0.32) - 0.5
    tip = np.maximum(0.77 * abs(x) + 0.64 * y - 0.5, -y - 0.4)
    return np.minimum(lobes, tip)


SHAPES: dict[str, Shape] = dict(zip(CLASSES, (_disc, _square, _triangle, _star, _cross, _ring, _heart), strict=True))


def distance(shape: Shape, rng: np.random.Generator) -> Array:
    """Return the signed distance (64,64) in pixels to a shape at a random place, angle, size and stretch."""
    row, column = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
    size = SIDE * rng.uniform(0.22, 0.38)
    centre = SIDE / 2 + rng.uniform(-0.12, 0.12, 2) * SIDE
    angle, stretch = rng.uniform(-0.45, 0.45), np.exp(rng.uniform(-0.15, 0.15))
    x, y = (column - centre[0]) / size, (row - centre[1]) / size
    turned_x = (np.cos(angle) * x + np.sin(angle) * y) * stretch
    turned_y = (-np.sin(angle) * x + np.cos(angle) * y) / stretch
    return (shape(turned_x, turned_y) * size).astype(np.float32)


# --- painters: a signed distance becomes a picture ------------------------------------------------------------------


def _smooth_noise(rng: np.random.Generator, cells: int, channels: int = 1) -> Array:
    """Return noise in [0,1] with features of SIDE/cells pixels."""
    coarse = rng.random((cells + 2, cells + 2, channels), dtype=np.float32)
    place = np.arange(SIDE, dtype=np.float32) * (cells / SIDE)
    index, part = place.astype(int), place - place.astype(int)
    part = (part * part * (3 - 2 * part))[:, None, None]
    rows = coarse[index] * (1 - part) + coarse[index + 1] * part
    part = part.reshape(1, SIDE, 1)
    return (rows[:, index] * (1 - part) + rows[:, index + 1] * part).astype(np.float32)


def _inside(distance: Array, softness: float = 0.7) -> Array:
    return (1 / (1 + np.exp(np.clip(distance / softness, -30, 30)))).astype(np.float32)[..., None]


def _colours(rng: np.random.Generator, apart: float) -> tuple[Array, Array]:
    """Return two colours that differ clearly."""
    while True:
        one, two = rng.random((2, 3), dtype=np.float32)
        if abs(one - two).sum() > apart:
            return one, two


def photo(distance: Array, rng: np.random.Generator) -> Array:
    """Paint a shaded texture on a textured ground, with soft light and a little grain."""
    fore, back = _colours(rng, 0.7)
    ground = back + 0.35 * (_smooth_noise(rng, 5, 3) - 0.5) + 0.2 * (_smooth_noise(rng, 17) - 0.5)
    skin = fore + 0.25 * (_smooth_noise(rng, 9, 3) - 0.5)
    depth = np.clip(-distance / 9, 0, 1)[..., None]
    lit = skin * (0.65 + 0.5 * depth)
    shadow = 1 - 0.35 * _inside(np.roll(distance, (3, 3), (0, 1)), 2.5)
    image = ground * shadow * (1 - _inside(distance, 1.0)) + lit * _inside(distance, 1.0)
    light = 0.8 + 0.4 * _smooth_noise(rng, 2)
    return (image * light + rng.normal(0, 0.02, image.shape)).astype(np.float32)


def painting(distance: Array, rng: np.random.Generator) -> Array:
    """Paint wobbly outlines, filled with brush strokes in a reduced palette."""
    fore, back = _colours(rng, 0.6)
    wobbly = distance + 3.0 * (_smooth_noise(rng, 9)[..., 0] - 0.5)
    angle = rng.uniform(0, np.pi)
    row, column = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
    along = (np.cos(angle) * column + np.sin(angle) * row) / 2.2
    strokes = np.sin(along + 5 * _smooth_noise(rng, 6)[..., 0])[..., None]
    inside = _inside(wobbly, 0.9)
    image = back * (1 - inside) + fore * inside + 0.11 * strokes + 0.3 * (_smooth_noise(rng, 7, 3) - 0.5)
    return (np.round(image * 7) / 7).astype(np.float32)


def cartoon(distance: Array, rng: np.random.Generator) -> Array:
    """Paint flat colours with a dark outline."""
    fore, back = _colours(rng, 0.8)
    image = back * (1 - _inside(distance)) + fore * _inside(distance)
    outline = _inside(abs(distance) - rng.uniform(1.0, 2.0), 0.5)
    return (image * (1 - outline) + 0.06 * outline).astype(np.float32)


def sketch(distance: Array, rng: np.random.Generator) -> Array:
    """Paint a shaky pencil line on white paper."""
    wobbly = distance + 2.2 * (_smooth_noise(rng, 8)[..., 0] - 0.5)
    line = _inside(abs(wobbly) - rng.uniform(0.5, 1.1), 0.45)
    pressure = 0.55 + 0.45 * _smooth_noise(rng, 6)
    paper = rng.uniform(0.93, 1.0)
    return np.repeat(paper - line * pressure * rng.uniform(0.7, 0.95), 3, axis=2).astype(np.float32)


PAINTERS: dict[str, Painter] = {"photo": photo, "painting": painting, "cartoon": cartoon, "sketch": sketch}
