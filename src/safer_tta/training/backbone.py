"""A small residual network pretrained on letters and digits, shipped with the package: the embedded data's ImageNet.

`safer train backbone` makes it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .._internal import safetensors_io
from ..data import Domain
from ..data.glyphs import CHARACTERS, glyphs
from ..data.store import digest_arrays
from .trainer import Recipe, train

SHIPPED = Path(__file__).parent / "backbone.safetensors"
RECIPE = Recipe(architecture="small", steps=2000, batch=64, lr=2e-3, every=200)
IMAGES = 9000


def make_backbone(path: str | os.PathLike[str], recipe: Recipe = RECIPE, images: int = IMAGES, **options: Any) -> None:
    """Pretrain on glyphs and write the whole network, head included, in half precision."""
    pictures, labels = glyphs(images, seed=recipe.seed)
    domain = Domain("glyphs", "glyphs", pictures, labels, tuple(CHARACTERS), digest_arrays(pictures, labels))
    full = Path(path).with_suffix(".full.safetensors")
    trained = train([domain], recipe, full, **options)
    state = trained.model.state_dict()
    tensors = {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in state.items()}
    safetensors_io.write(path, tensors, {"architecture": "small", "trained_on": f"{images} glyphs, seed {recipe.seed}"})
    full.unlink()
