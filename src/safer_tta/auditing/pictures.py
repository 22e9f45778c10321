"""The worst images of a threat, in a file beside its row."""

import json
from pathlib import Path

import torch

from .._internal import safetensors_io
from .measure import Picture

FACTS = ("label", "answer", "confidence", "before")


def write_pictures(path: Path, pictures: list[Picture]) -> None:
    tensors = {}
    if pictures:
        tensors = {name: torch.stack([getattr(p, name) for p in pictures]) for name in ("clean", "attacked")}
    facts = [{name: getattr(picture, name) for name in FACTS} for picture in pictures]
    safetensors_io.write(path, tensors, {"facts": json.dumps(facts)})


def read_pictures(path: Path) -> list[Picture]:
    """Return the images that a file holds; none if somebody removed it."""
    if not path.exists():
        return []
    tensors, about = safetensors_io.read(path)
    facts = json.loads(about["facts"])
    return [Picture(tensors["clean"][i], tensors["attacked"][i], **fact) for i, fact in enumerate(facts)]
