"""Images as they arrive. What their headers claim is checked before anything large is decoded."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .._internal.resizing import STRETCH, Resize
from ..data.decoding import to_rgb
from .limits import Limits, Refused

# Pixels are counted here, by the header of every image.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
FORMATS = ("PNG", "JPEG", "WEBP")
Pictures = NDArray[np.uint8]  # (B,3,H,W), or (3,H,W)


def from_files(files: Sequence[bytes], side: int, limits: Limits, resize: Resize = STRETCH) -> Iterator[Pictures]:
    """Yield the pictures in image files at the model's side. All sizes are checked before the first is decoded."""
    check_count(len(files), limits)
    pixels = sum(_count_pixels(content, number, limits) for number, content in enumerate(files))
    most = limits.batch_pixels
    if pixels > most:
        raise Refused(413, f"the batch has {pixels} pixels; expected at most {most}. Send several batches")
    for number, content in enumerate(files):
        yield _decode(content, number, side, resize)


def _count_pixels(content: bytes, number: int, limits: Limits) -> int:
    with _open(content, number) as image:
        pixels = int(image.width * image.height)
        if pixels > limits.pixels:
            found = f"{image.width}×{image.height} pixels"
            raise Refused(413, f"image {number} has {found}; expected at most {limits.pixels}")
        return pixels


def _decode(content: bytes, number: int, side: int, resize: Resize) -> Pictures:
    with _open(content, number) as image:
        picture = resize.apply(to_rgb(image), side)
        return np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1)


@contextlib.contextmanager
def _open(content: bytes, number: int) -> Iterator[Any]:
    """Open an image and read its header; every failure is reported to the client."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            yield image
    except Refused:
        raise
    except Image.DecompressionBombError as error:
        raise Refused(413, f"image {number} has too many pixels; send a smaller one") from error
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        expected = f"a complete {', '.join(FORMATS)} file"
        raise Refused(422, f"image {number} cannot be decoded; expected {expected}") from error


def from_array(content: bytes, side: int, limits: Limits) -> Pictures:
    """Read a NumPy array file of bytes. Its header is checked before the pixels are read."""
    file = io.BytesIO(content)
    layouts = f"(B,{side},{side},3) or (B,3,{side},{side})"
    try:
        version = np.lib.format.read_magic(file)
        reader: Any = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = reader[version](file)
    except Exception as error:
        problem = "the body is not a NumPy array file"
        raise Refused(422, f"{problem}; expected what numpy.save writes for a uint8 array") from error
    if not all(type(length) is int and 0 <= length < 2**31 for length in shape):
        raise Refused(422, f"the array's header has the shape {str(shape)[:80]}; expected {layouts}")
    if dtype != np.uint8 or len(shape) != 4:
        raise Refused(422, f"the array is {dtype} of shape {shape}; expected uint8 {layouts}")
    check_count(shape[0], limits)
    if tuple(shape[1:]) not in ((side, side, 3), (3, side, side)):
        raise Refused(422, f"the array has shape {shape}; expected {layouts}")
    size = int(np.prod(shape))
    if len(content) - file.tell() != size:
        raise Refused(422, f"the array holds {len(content) - file.tell()} bytes; expected {size}, as its header says")
    pixels = np.frombuffer(content, dtype=np.uint8, offset=file.tell())
    array = pixels.reshape(shape, order="F" if fortran else "C")
    return np.array(array if shape[3] != 3 or shape[1] == 3 else array.transpose(0, 3, 1, 2), order="C")


def check_count(count: int, limits: Limits) -> None:
    """Refuse a batch with too few or too many images."""
    if count < 1:
        raise Refused(422, "the batch has no images; expected at least one (multipart: parts named images)")
    if count > limits.images:
        raise Refused(413, f"the batch has {count} images; expected at most {limits.images}. Send several batches")
