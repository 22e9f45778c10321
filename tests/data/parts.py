"""Small folders of images and small domains."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from safer_tta.data import Domain
from tests.conftest import PACS


def picture(path: Path, colour: tuple[int, int, int] = (10, 200, 30), size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def image_folder(
    root: Path, domains: Sequence[str] = ("one", "two"), classes: Sequence[str] = ("cat", "dog"), count: int = 3
) -> Path:
    """Write root/domain/class/image; the colour of an image says where it lies."""
    for d, domain in enumerate(domains):
        for c, name in enumerate(classes):
            for i in range(count):
                picture(root / domain / name / f"{i}.png", (40 * d, 80 * c % 256, 20 * i))
    return root


def pacs_excerpt(root: Path, count: int) -> Path:
    """Copy the first images of every class of PACS."""
    for place in sorted(PACS.glob("*/*")):
        (root / place.relative_to(PACS)).mkdir(parents=True)
        for image in sorted(place.iterdir())[:count]:
            shutil.copy(image, root / place.relative_to(PACS))
    return root


def domain(count: int = 100, classes: int = 4, name: str = "d", offset: int = 0) -> Domain:
    """Return a domain of which every image has one grey value: its number plus an offset."""
    labels = np.arange(count, dtype=np.int64) % classes
    images = (np.arange(count, dtype=np.uint8)[:, None, None, None] + offset) * np.ones((1, 3, 2, 2), np.uint8)
    return Domain("test", name, images, labels, tuple("abcd"[:classes]), f"{name}{count}{offset}")
