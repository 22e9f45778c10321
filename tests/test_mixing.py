"""Test how mixings are made and which way their signals point; tests/parity has their formulas."""

import pytest
import torch

from safer_tta import AdaptiveMixing, Safer, mixing
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from tests.conftest import classifier


def test_reported_signals_grow_with_suspicion_whichever_way_a_signal_points(images):
    """Services and rows detect attacks by large values."""
    network = classifier().eval()
    options = {"signal": "orig_margin", "tau": 0.2}
    mixings = [AdaptiveMixing(**options, higher_is_suspicious=higher) for higher in (True, False)]
    up, down = (Safer(network, mixing=given, seed=0)(images).report for given in mixings)
    assert torch.equal(up.signals["orig_margin"], -down.signals["orig_margin"])
    order = down.signals["orig_margin"].argsort()
    assert (down.weights[0][order].diff() <= 0).all(), "the more suspicious, the less the original counts"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"curve": "cubic"}, UnknownNameError, "sigmoid"),
        ({"signal": "gut"}, UnknownNameError, "feat_disagreement"),
        ({"alpha_clean": 1.2}, InvalidValueError, "alpha_clean is 1.2; expected a number from 0 to 1"),
        ({"delta": 0}, InvalidValueError, "delta is 0; expected a positive number"),
        ({"higher_is_suspicious": 1}, InvalidTypeError, "expected True or False"),
    ],
)
def test_options_that_cannot_work_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        AdaptiveMixing(**options)
    with pytest.raises(error, match=says):
        mixing.create(options)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("soft", UnknownNameError, "sigmoid"),
        ({"name": "soft"}, UnknownNameError, "gate.*sigmoid"),
        ({"name": "gate", "taus": 1}, InvalidTypeError, "mixing 'gate' has no option taus; expected some of cost"),
        (True, InvalidTypeError, "mixing is True; expected one of .*sigmoid"),
        (None, InvalidTypeError, "mixing is None; expected one of .*none"),
        (AdaptiveMixing, InvalidTypeError, "expected one of .*sigmoid"),
    ],
)
def test_what_is_not_a_mixing_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        mixing.create(given)


def test_an_unknown_signal_is_refused():
    with pytest.raises(UnknownNameError, match="feat_disagreement"):
        mixing.signal("gut", torch.rand(2, 3, 4), torch.rand(2, 3, 4))
