"""Test how methods are registered, described and made by name."""

import pytest
import torch

import safer_tta
from safer_tta.errors import InvalidTypeError, UnknownNameError
from safer_tta.methods import METHODS, create, describe, register


@pytest.fixture(autouse=True)
def _take_out_what_a_test_registers():
    known = set(METHODS)
    yield
    for name in set(METHODS) - known:
        del METHODS[name]


def test_a_method_that_updates_something_unknown_is_refused():
    with pytest.raises(UnknownNameError, match=r"updates 'norms' is unknown.*'norm'"):
        register("typo")(type("Typo", (METHODS["none"],), {"updates": "norms"}))
    assert "typo" not in METHODS


def test_a_method_defined_in_a_notebook_is_described():
    for _ in range(2):  # a cell may be run again
        register("mine")(type("Mine", (METHODS["none"],), {"__module__": "__main__"}))
    assert describe("mine")["updates"] == "none"


def test_the_docstring_of_a_class_that_cites_a_paper_describes_it():
    text = 'Mine: learns from everything.\n\nSomebody et al., "Everything", CONF 2026.\n'
    register("cited")(type("Cited", (METHODS["none"],), {"__doc__": text, "__module__": __name__}))
    assert describe("cited")["what"] == "Mine: learns from everything."
    assert describe("cited")["paper"] == 'Somebody et al., "Everything", CONF 2026'


def test_a_method_may_hand_any_option_to_its_base(model, images):
    class Anything(METHODS["tent"]):
        def __init__(self, predictor, **options):
            super().__init__(predictor, **options)

    register("anything")(Anything)
    adapted = safer_tta.adapt(model, "anything", seed=0, lr=0.5)
    assert adapted.settings == {"lr": 0.5}
    assert torch.isfinite(adapted(images).probs).all()
    with pytest.raises(InvalidTypeError, match="anything has no option rate; expected some of lr"):
        safer_tta.adapt(model, "anything", rate=0.5)


def test_a_model_in_the_place_of_a_predictor_is_refused(model):
    with pytest.raises(InvalidTypeError, match=r"predictor is SmallNet; expected .*Plain"):
        create("tent", model)
