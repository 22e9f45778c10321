"""Images as they arrive: every format becomes the same pixels, and sizes are checked."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from safer_tta.serve.images import from_array, from_files
from safer_tta.serve.limits import Limits, Refused
from tests.serve.helpers import SIDE, Replay, array_file, image_file


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_files_of_every_format_are_resized(asking, kind):
    name = asking.create()["name"]
    assert len(asking.send(name, [image_file(90, kind), image_file(SIDE, kind)])["labels"]) == 2


def test_grey_and_transparent_pictures_become_rgb(asking):
    name = asking.create()["name"]
    files = [image_file(mode=mode) for mode in ("L", "RGBA", "P", "1")]
    assert len(asking.send(name, files)["labels"]) == 4


def test_files_and_arrays_of_the_same_pixels_get_the_same_answer(asking, source_file):
    image = np.asarray(Image.open(io.BytesIO(image_file())))
    asking.create("twin")
    given = asking.send("twin", np.stack([image] * 2))["probabilities"]
    assert given == Replay(source_file, "twin")(np.stack([image.transpose(2, 0, 1)] * 2))
    fresh = Replay(source_file, "other-twin")
    asking.create("other-twin")
    files = asking.send("other-twin", [image_file()] * 2)["probabilities"]
    assert files == fresh(np.stack([image.transpose(2, 0, 1)] * 2))
    assert np.array_equal(from_files([image_file()], SIDE, Limits())[0], image.transpose(2, 0, 1))
    assert np.array_equal(from_array(array_file(image[None]), SIDE, Limits())[0], image.transpose(2, 0, 1))


def test_sixteen_bits_of_grey_are_not_clipped():
    ramp = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    (picture,) = from_files([file.getvalue()], SIDE, Limits())
    assert 126 < picture.mean() < 129


def test_pixels_are_counted_over_the_whole_batch():
    with pytest.raises(Refused, match="the batch has 8192 pixels"):
        from_files([image_file()] * 2, SIDE, Limits(batch_pixels=8000))
