import io

import numpy as np
import pytest
from PIL import Image

from safer_tta.serve.images import from_array, from_files
from safer_tta.serve.limits import Limits, Refused
from tests.serve.helpers import SIDE, Replay, array_file, image_file

FILES = {kind: [image_file(90, kind), image_file(SIDE, kind)] for kind in ("PNG", "JPEG", "WEBP")}
FILES["grey and transparent"] = [image_file(mode=mode) for mode in ("L", "RGBA", "P", "1")]


@pytest.mark.parametrize("kind", FILES)
def test_files_of_every_kind_become_rgb_of_one_size(asking, kind):
    name = asking.create()["name"]
    assert len(asking.send(name, FILES[kind])["labels"]) == len(FILES[kind])


def test_files_and_arrays_of_the_same_pixels_get_the_same_answer(asking, source_file):
    image = np.asarray(Image.open(io.BytesIO(image_file())))
    expected = image.transpose(2, 0, 1)
    for name, sent in (("twin", np.stack([image] * 2)), ("other-twin", [image_file()] * 2)):
        asking.create(name)
        assert asking.send(name, sent)["probabilities"] == Replay(source_file, name)(np.stack([expected] * 2))
    assert np.array_equal(next(from_files([image_file()], SIDE, Limits())), expected)
    assert np.array_equal(from_array(array_file(image[None]), SIDE, Limits())[0], expected)


def test_sixteen_bits_of_grey_are_not_clipped():
    ramp = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "PNG")
    (picture,) = from_files([file.getvalue()], SIDE, Limits())
    assert 126 < picture.mean() < 129


def test_an_upload_stands_upright_however_the_camera_was_held():
    image, exif, file = Image.new("RGB", (SIDE, SIDE)), Image.Exif(), io.BytesIO()
    image.paste((250, 10, 10), (0, 0, SIDE // 2, SIDE // 2))  # top left
    exif[0x0112] = 6  # turned by a quarter to the left when it was stored
    image.save(file, "PNG", exif=exif)
    (picture,) = from_files([file.getvalue()], SIDE, Limits())
    assert picture[0, 0, -1] == 250  # top right
    assert picture[0, 0, 0] == 0


def test_pixels_are_counted_over_the_whole_batch():
    with pytest.raises(Refused, match="the batch has 8192 pixels"):
        next(from_files([image_file()] * 2, SIDE, Limits(batch_pixels=8000)))
