"""Image files as people have them: of any depth and colour mode, and turned as the camera was held."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._internal.resizing import STRETCH, Resize
from ..errors import DataError

ORIENTATION = 0x0112  # the EXIF tag
# How a stored image is turned or mirrored to stand upright, by the value of the tag; Pillow's names.
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


def decode(path: Path, side: int | None, resize: Resize = STRETCH) -> NDArray[np.uint8]:
    """Return an image file as (3,side,side) bytes, upright; `side=None` keeps its size."""
    from PIL import Image

    if is_broken_link(path):
        raise DataError(f"{path} is a link to a file that does not exist. Replace or remove the link")
    try:
        with Image.open(path) as image:
            picture = to_rgb(image)
            if side is not None:
                picture = resize.apply(picture, side)
            return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}. Replace or remove the file") from error


def is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def is_turned(path: Path) -> bool:
    """Return whether the image in a file has to be turned to stand upright; only its header is read."""
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(path) as image:  # `decode` reports what cannot be read
        return "exif" in image.info and _turn(image) is not None
    return False


def to_rgb(image: Any) -> Any:
    """Return an open image in eight-bit RGB, upright."""
    if image.mode == "F":
        raise DataError("its pixels are floating-point numbers, of an unknown range; expected 8 or 16 bits")
    image.load()  # Pillow turns TIFF files itself when it loads them, and drops the tag
    turn = _turn(image)
    picture = _eight_bit(image).convert("RGB")
    return picture if turn is None else picture.transpose(turn)


def _eight_bit(image: Any) -> Any:
    """Return a 16-bit grey image by its upper eight bits; Pillow would clip it to white."""
    return image.point(lambda value: value / 257).convert("L") if image.mode.startswith("I;16") else image


def _turn(image: Any) -> Any:
    """Return how Pillow has to turn an image, or None; a damaged EXIF block says nothing."""
    from PIL import Image

    try:
        name = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # Pillow's EXIF reader raises errors of many kinds
        return None
    return None if name is None else Image.Transpose[name]
