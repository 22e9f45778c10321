"""Test how predictors and their transforms are registered and made by name."""

import pytest

from safer_tta import Defended, predictors
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from safer_tta.predictors import TRANSFORMS


def test_an_unknown_name_is_refused(model):
    with pytest.raises(UnknownNameError, match="safer-a"):
        predictors.create("gate?", model)
    with pytest.raises(UnknownNameError, match="jpeg"):
        Defended(model, "png")


@pytest.mark.parametrize("option", ["quality", "transform"])
def test_an_option_that_does_not_exist_is_refused(model, option):
    with pytest.raises(InvalidTypeError, match=f"'jpeg' has no option {option}"):
        predictors.create("jpeg", model, **{option: 3})


def test_two_transforms_cannot_have_one_name():
    shipped = TRANSFORMS["jpeg"]
    with pytest.raises(InvalidValueError, match="transform 'jpeg' exists already"):
        TRANSFORMS.register("jpeg")(lambda images: images)
    assert TRANSFORMS["jpeg"] is shipped
