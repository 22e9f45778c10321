"""Test how predictors are made by name."""

from __future__ import annotations

import pytest

from safer_tta import predictors
from safer_tta.errors import InvalidTypeError, UnknownNameError


def test_an_unknown_name_is_refused(model):
    with pytest.raises(UnknownNameError, match="safer-a"):
        predictors.create("gate?", model)


@pytest.mark.parametrize("option", ["quality", "transform"])
def test_an_option_that_does_not_exist_is_refused(model, option):
    with pytest.raises(InvalidTypeError, match=f"'jpeg' has no option {option}"):
        predictors.create("jpeg", model, **{option: 3})
