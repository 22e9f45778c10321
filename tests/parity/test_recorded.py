"""Every method on every predictor answers as it did before the second edition of the house."""

import pytest
import torch

from safer_tta import methods
from safer_tta._internal import safetensors_io
from tests.parity.recorded import FILE, PREDICTORS, answers

TENSORS, _ = safetensors_io.read(FILE)
TOLERANCES = {"jpeg": 1e-3}  # a pixel near the edge of a rounding step may fall to either side


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("method", sorted({name.partition("/")[0] for name in TENSORS} & set(methods.METHODS)))
def test_answers_are_those_recorded(method, predictor):
    probs = answers(method, predictor)
    expected = TENSORS[f"{method}/{predictor}"]
    torch.testing.assert_close(probs, expected, rtol=0, atol=TOLERANCES.get(predictor, 1e-6))


def test_every_method_was_recorded():
    assert {name.partition("/")[0] for name in TENSORS} >= {"bn", "cotta", "eata", "memo", "none", "note", "pl"}
    assert len(TENSORS) == 16 * len(PREDICTORS)
