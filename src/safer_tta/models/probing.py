"""Whether a packed model gets the pixels that the image processor of its Hugging Face folder gives."""

import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._internal.resizing import FILTERS, Resize
from ..errors import InvalidValueError
from . import building
from .classifier import Classifier
from .normalisation import read_processors

Pixels = NDArray[np.floating[Any]]
SIZE = (400, 300)  # of the probe; it is not square, so that a crop differs from a stretched picture
SHARES = (None, 0.875, *(percent / 100 for percent in range(100, 49, -1)))  # of the shorter side, in advice
CLOSE = 0.01  # two normalised values that differ by less are equal


class Colours(NamedTuple):
    """What a processor makes of the values of each channel."""

    mean: Pixels  # (3,)
    std: Pixels


def check(folder: Path, classifier: Classifier, side: int | None, resize: str, trusted: Collection[str]) -> None:
    """Refuse a file whose images would be others than those of the image processor in the folder.

    Args:
        folder: The folder of a Hugging Face model. Without the file of a processor there is nothing to compare.
        classifier: The model, with the normalisation that the file would declare.
        side: The side of the images, if it is known.
        resize: The rule by which images would come to that side.
        trusted: What the user gave, of "side", "resize" and "mean"; it is not compared.

    Raises:
        InvalidValueError: If they differ, with the options that give the same pixels.
    """
    if not any(read_processors(folder)) or (classifier.channels and 3 not in classifier.channels):
        return
    try:
        process = _processor(folder)
        colours, output = _colours_of(process), process(_probe())
    except InvalidValueError:
        raise
    except Exception as error:  # of transformers, in its own words
        if {"side", "resize", "mean"} <= set(trusted):
            return
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise InvalidValueError(
            f"the image processor of {folder} cannot be run ({reason}), so that what it does to images is unknown. "
            "Give all of it: --side, --resize, --mean and --std"
        ) from error
    advice = [] if "mean" in trusted else _compare_colours(classifier, colours)
    if side is not None:
        advice += _compare_shape(output * _tall(colours.std) + _tall(colours.mean), side, Resize.parse(resize), trusted)
    if advice:
        raise InvalidValueError(
            f"the image processor of {folder} gives other pixels than its settings were read to give. Closest to it "
            f"is: {' '.join(advice)}. Give these options, or those with which the model was trained"
        )


def _processor(folder: Path) -> Callable[[Any], Pixels]:
    """Return the folder's own processor as a function from a picture of Pillow's to (3,H,W)."""
    try:
        from transformers import AutoImageProcessor
    except (ImportError, RuntimeError) as error:
        raise building.missing_transformers(error) from error
    made = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False, backend="pil")

    def process(picture: Any) -> Pixels:
        pixels = np.asarray(made(picture, return_tensors="np")["pixel_values"][0], dtype=np.float32)
        if pixels.ndim != 3 or len(pixels) != 3:
            raise ValueError(f"it gives pixels of {pixels.shape}; expected three channels")
        return pixels

    return process


def _colours_of(process: Callable[[Any], Pixels]) -> Colours:
    """Return the normalisation that a processor applies, from what it makes of pictures of one colour."""
    from PIL import Image

    def centre(colour: tuple[int, int, int]) -> Pixels:
        pixels = process(Image.new("RGB", SIZE, colour))
        return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2]

    black, white, red = (centre(colour) for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 0)))
    changed = np.abs(red - black) > CLOSE * np.abs(white - black)
    if changed.tolist() != [True, False, False]:
        raise InvalidValueError(
            "the image processor of this model changes the order of the channels (do_flip_channel_order), which a "
            "packed file does not. Put the network into a function of your own file that does so first, "
            "lambda x: x.flip(1), and pack FILE.py:FUNCTION"
        )
    std = 1 / (white - black)
    return Colours(0 - black * std, std)


def _compare_colours(classifier: Classifier, colours: Colours) -> list[str]:
    """Return the options for another normalisation than the classifier has; none if it is the same."""
    shift, scale = classifier.mean, classifier.std
    mean = 0.0 if shift is None else shift.detach().float().flatten().cpu().numpy()
    std = 1.0 if scale is None else scale.detach().float().flatten().cpu().numpy()
    if all(np.allclose((c - mean) / std, (c - colours.mean) / colours.std, atol=CLOSE, rtol=CLOSE) for c in (0, 1)):
        return []
    return [
        f"--{name} {','.join(f'{round(float(value), 4):g}' for value in values)}"
        for name, values in colours._asdict().items()
    ]


def _compare_shape(theirs: Pixels, side: int, rule: Resize, trusted: Collection[str]) -> list[str]:
    """Return the options for the side and the resize rule of a processor; none if these are the same.

    Args:
        theirs: What the processor makes of the probe, as pixels in [0,1].
        side: The side of the packed file.
        rule: Its resize rule.
        trusted: What the user gave.
    """
    advice = []
    if "side" not in trusted and theirs.shape[1:] != (side, side):
        advice = [f"--side {min(theirs.shape[1:])}"]
    height, width = theirs.shape[1:]

    def distance(other: Resize) -> float:
        return float(np.abs(_pixels(other.apply(_probe(), max(height, width)))[:, :height, :width] - theirs).mean())

    # Both round to whole pixels at other places, so a shift by one pixel is no difference.
    moved = sum(float(np.abs(np.diff(theirs, axis=axis)).mean()) for axis in (1, 2))
    if "resize" not in trusted and (height != width or distance(rule) > moved + 1 / 255):
        nearest = min((Resize(share, rule.filter) for share in SHARES), key=distance)
        advice.append(f"--resize '{nearest}'")
    return advice


def _probe() -> Any:
    """Return a smooth picture, on which filters hardly differ and places do."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(256, size=(6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(SIZE, FILTERS["bicubic"])


def _pixels(picture: Any) -> Pixels:
    """Return a picture as (3,H,W) in [0,1]."""
    return np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 255


def _tall(values: Pixels) -> Pixels:
    return values[:, None, None]
