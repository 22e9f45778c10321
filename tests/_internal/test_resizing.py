import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from safer_tta._internal.resizing import FILTERS, STRETCH, Resize
from safer_tta.errors import InvalidValueError

WIDE = Image.fromarray(np.random.default_rng(0).integers(256, size=(30, 50, 3), dtype=np.uint8))


@given(
    share=st.none() | st.floats(0.1, 1).map(lambda share: float(f"{share:g}")), filter=st.sampled_from(list(FILTERS))
)
def test_a_rule_is_read_as_it_is_written(share, filter):
    assert Resize.parse(str(Resize(share, filter))) == Resize(share, filter)


@pytest.mark.parametrize(
    "text", ["", "squash", "crop 0", "crop 2", "crop x", "stretch 0.5", "crop 0.5 nearest", "crop 1 1"]
)
def test_other_rules_are_refused(text):
    with pytest.raises(InvalidValueError, match="expected 'stretch', or 'crop'"):
        Resize.parse(text)


def test_short_forms():
    assert Resize.parse("stretch") == STRETCH
    assert Resize.parse("crop") == Resize(1.0)
    assert Resize.parse("crop bicubic") == Resize(1.0, "bicubic")


def test_stretch_is_pillows_own_resize_and_leaves_the_right_size_alone():
    assert np.array_equal(STRETCH.apply(WIDE, 20), WIDE.resize((20, 20), Image.Resampling.BILINEAR))
    square = WIDE.crop((0, 0, 20, 20))
    assert STRETCH.apply(square, 20) is square
    assert Resize(1.0).apply(square, 20) is square


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("filter", FILTERS)
def test_a_crop_is_the_scaled_centre(share, filter):
    """At a scale of one it is exactly the centre; otherwise it is the scaled picture's centre, but for its border."""
    kept = int(30 * share)
    left, top = (50 - kept) / 2, (30 - kept) / 2
    if left == int(left) and top == int(top):
        centre = WIDE.crop((int(left), int(top), int(left) + kept, int(top) + kept))
        assert np.array_equal(Resize(share, filter).apply(WIDE, kept), centre)
    side = 2 * kept
    whole = np.asarray(WIDE.resize((100, 60), FILTERS[filter]), dtype=int)
    y, x = (60 - side) // 2, (100 - side) // 2
    found = np.asarray(Resize(share, filter).apply(WIDE, side), dtype=int)
    expected = whole[y : y + side, x : x + side]
    assert abs(found - expected)[4:-4, 4:-4].max() <= 1


def test_a_long_strip_makes_no_large_picture():
    strip = Image.new("RGB", (60_000, 1), (9, 8, 7))
    assert np.asarray(Resize(0.875).apply(strip, 224)).reshape(-1, 3).tolist() == [[9, 8, 7]] * 224**2
