"""Test which transforms a defended predictor accepts."""

from __future__ import annotations

import pytest

from safer_tta import Defended
from safer_tta.errors import InvalidValueError, UnknownNameError
from safer_tta.predictors import TRANSFORMS


def test_an_unknown_transform_is_refused(model):
    with pytest.raises(UnknownNameError, match="jpeg"):
        Defended(model, "png")


def test_two_transforms_cannot_have_one_name():
    shipped = TRANSFORMS["jpeg"]
    with pytest.raises(InvalidValueError, match="transform 'jpeg' exists already"):
        TRANSFORMS.register("jpeg")(lambda images: images)
    assert TRANSFORMS["jpeg"] is shipped
