"""Pretrain the small network that ships with the package, on letters and digits in the styles of the embedded domains.

python tools/pretrain_backbone.py --out src/safer_tta/training/backbone.safetensors

Source model and surrogate both start from this network, as both start from ImageNet in the paper. Attacks transfer
between them because of it; networks that are trained from scratch share few weaknesses.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from safer_tta._internal import safetensors_io
from safer_tta._internal.progress import progress
from safer_tta.data import Domain
from safer_tta.data.store import digest_arrays
from safer_tta.data.synthetic import PAINTERS, SIDE, Array, to_uint8
from safer_tta.training import Recipe, train

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
REACH = 8  # distances are exact up to this many pixels and cut off beyond, where painters do not look
IMAGES, STEPS = 9000, 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    recipe = Recipe(architecture="small", steps=given.steps, batch=64, lr=2e-3, every=200)
    with progress("backbone") as tick:
        pretrain(given.out, recipe, given.images, device=given.device, tick=tick)


def pretrain(path: Path, recipe: Recipe, images: int, **options: Any) -> None:
    """Train on glyphs and write the whole network, head included, in half precision."""
    pictures, labels = glyphs(images, seed=recipe.seed)
    domain = Domain("glyphs", "glyphs", pictures, labels, tuple(CHARACTERS), digest_arrays(pictures, labels))
    full = path.with_suffix(".full.safetensors")
    trained = train([domain], recipe, full, **options)
    state = trained.model.state_dict()
    tensors = {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in state.items()}
    safetensors_io.write(path, tensors, {"architecture": "small", "trained_on": f"{images} glyphs, seed {recipe.seed}"})
    full.unlink()


def glyphs(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return `count` images (count,3,64,64) and labels: the characters in turn, each in a random style."""
    labels = np.arange(count, dtype=np.int64) % len(CHARACTERS)
    painters = list(PAINTERS.values())
    images = []
    for index, label in enumerate(labels):
        rng = np.random.default_rng([seed, index])
        paint = painters[rng.integers(len(painters))]
        images.append(to_uint8(paint(_distance(CHARACTERS[label], rng), rng)))
    return np.stack(images), labels


def _distance(character: str, rng: np.random.Generator) -> Array:
    """Return the signed distance in pixels to a character at a random place, angle and size."""
    canvas = Image.new("L", (SIDE, SIDE))
    centre = SIDE / 2 + rng.uniform(-0.1, 0.1, 2) * SIDE
    font = _font(int(SIDE * rng.uniform(0.55, 0.85)))
    ImageDraw.Draw(canvas).text(tuple(centre), character, fill=255, font=font, anchor="mm", stroke_width=1)
    turned = canvas.rotate(float(rng.uniform(-25, 25)), resample=Image.Resampling.BILINEAR)
    mask = np.asarray(turned) > 127
    return _reach(~mask) - _reach(mask)


@functools.cache
def _font(size: int):  # type: ignore[no-untyped-def]
    return ImageFont.load_default(size)


def _reach(mask: NDArray[np.bool_]) -> Array:
    """Return how deep inside the mask each pixel lies: how often it survives when the border is peeled off."""
    depth = np.zeros(mask.shape, np.float32)
    for step in range(REACH):
        depth += mask
        grown = np.pad(mask, 1, constant_values=True)
        neighbours = grown[:-2, 1:-1] & grown[2:, 1:-1] & grown[1:-1, :-2] & grown[1:-1, 2:]
        if step % 2:  # every other time with the diagonals: an octagon is nearly a circle
            neighbours &= grown[:-2, :-2] & grown[2:, 2:] & grown[:-2, 2:] & grown[2:, :-2]
        mask = mask & neighbours
    return depth


if __name__ == "__main__":
    main()
