"""Test what `repr(adapted)` says: the facts that a user would look up in the model."""

import pytest

import safer_tta
from safer_tta.methods import METHODS
from tests.conftest import CLASSES, adapt_small, small_net


def described(adapted):
    """Return the lines of a description by name; the first is called `method`."""
    first, *lines = repr(adapted).splitlines()
    return {"method": first} | {name.strip(): text for name, _, text in (line.partition(": ") for line in lines)}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_says_what_it_is_made_of(method):
    adapted = adapt_small(method, "safer-g")
    found = described(adapted)
    assert found["method"].startswith(f"{method}(")
    assert found["predictor"] == repr(adapted.predictor)
    assert found["head"] == f"'fc', 16 features to {CLASSES} classes"
    learning = sum(p.numel() for p in adapted.classifier.parameters() if p.requires_grad)
    assert found["learns"].startswith(f"{learning:,} of 1,525 parameters: ")
    assert found["normalisation"] == "mean [0.0, 0.0, 0.0], std [1.0, 1.0, 1.0]"
    assert found["norms"].startswith("2 ")


@pytest.mark.parametrize(
    ("options", "line", "says"),
    [
        ({"lr": 0.25}, "method", "tent(lr=0.25)"),
        ({"mean": (0.5, 0.4, 0.3), "std": 0.2}, "normalisation", "mean [0.5, 0.4, 0.3], std [0.2, 0.2, 0.2]"),
        ({}, "normalisation", "none declared"),
        ({"norm": "medbn"}, "norms", "2 MedBN with medians of the batch"),
        ({}, "norms", "2 BatchNorm2d with statistics of the batch"),
        ({"method": "none"}, "norms", "2 BatchNorm2d with running statistics"),
        ({"method": "pl"}, "norms", "2 BatchNorm2d with statistics of the batch, moving the running ones"),
        ({"method": "none"}, "learns", "0 of 1,525 parameters: none"),
        ({}, "learns", "48 of 1,525 parameters: scale and shift of the norms"),
        ({"method": "shot_im"}, "learns", "1,440 of 1,525 parameters: all but the head"),
        ({"method": "pl"}, "learns", "1,525 of 1,525 parameters: all"),
    ],
)
def test_a_description_has_the_facts(options, line, says):
    adapted = safer_tta.adapt(small_net(), **{"method": "tent", "predictor": "plain", "seed": 0, **options})
    assert described(adapted)[line] == says


def test_a_model_that_normalises_by_itself_says_where():
    model = small_net()
    model.norm1.mean, model.norm1.std = 0.5, 0.2  # as a layer that normalises images has them
    assert described(safer_tta.adapt(model))["normalisation"] == "by layer 'norm1' of the model"


def test_a_frozen_method_says_so():
    adapted = adapt_small()
    before = repr(adapted)
    assert "frozen" in described(adapted.freeze())["learns"]
    assert repr(adapted.unfreeze()) == before


def test_a_description_changes_nothing(images):
    one, other = adapt_small("cotta", "safer"), adapt_small("cotta", "safer")
    repr(one)
    assert (one(images).probs == other(images).probs).all()
