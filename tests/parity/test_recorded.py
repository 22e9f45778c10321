"""Every method on every predictor answers as it did before the second edition of the house."""

import pytest
import torch

from safer_tta import methods
from safer_tta._internal import safetensors_io
from tests.parity.recorded import DTYPES, FILE, PREDICTORS, answers, machine

TENSORS, HASHES = safetensors_io.read(FILE)


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("method", sorted({name.partition("/")[0] for name in TENSORS} & set(methods.METHODS)))
def test_answers_and_states_are_those_recorded(method, predictor):
    """To the last bit on a machine that computes as the one that recorded; elsewhere as closely as doubles allow."""
    for dtype in DTYPES:
        name = f"{method}/{predictor}/{dtype}"
        probs, digest = answers(method, predictor, dtype)
        if machine() == HASHES["machine"]:
            assert torch.equal(probs, TENSORS[name])
            assert digest == HASHES[name]
        elif dtype == "float64":
            torch.testing.assert_close(probs, TENSORS[name], rtol=1e-6, atol=1e-8)


def test_every_method_was_recorded():
    assert {name.partition("/")[0] for name in TENSORS} >= {"bn", "cotta", "eata", "memo", "none", "note", "pl"}
    assert len(TENSORS) == 16 * (len(PREDICTORS) + 1) * len(DTYPES)  # and the gate of then
