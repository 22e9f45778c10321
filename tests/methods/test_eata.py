"""Test how EATA is fitted to source images before a stream starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.conftest import LEARNING, batches, learnt, small_net


def eata(**options: object) -> safer_tta.Method:
    return safer_tta.adapt(small_net(), "eata", seed=0, **options)


def test_every_batch_is_seen_through_other_views_and_the_stream_is_drawn_as_ever(monkeypatch):
    fitted, other = eata(), eata()
    drawn = []
    real = fitted.predictor.draw
    monkeypatch.setattr(fitted.predictor, "draw", lambda images: drawn.append(real(images)) or drawn[-1])
    fitted.fit_source(batches(2))
    assert drawn[0].names != drawn[1].names
    assert torch.equal(fitted.predictor.generator.get_state(), other.predictor.generator.get_state())


def test_norms_that_answer_nothing_are_left_out():
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)
            self.unused, self.head = nn.BatchNorm2d(8), nn.Linear(8, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(images)).relu().mean((2, 3)))

    adapted = safer_tta.adapt(Auxiliary(), "eata", seed=0)
    adapted.fit_source(batches(1))
    assert [bool(adapted.state.memory[f"fisher{i}"].any()) for i in range(4)] == [True, True, False, False]


def test_what_was_fitted_stays_after_a_load_and_a_reset(tmp_path):
    fitted = eata()
    fitted.fit_source(batches(2))
    fitted.save(tmp_path / "fitted.safetensors")
    loaded = eata().load(tmp_path / "fitted.safetensors")
    loaded.reset()
    expected, got = ({n: t for n, t in m.state_dict().items() if "fisher" in n} for m in (fitted, loaded))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert any(tensor.any() for tensor in expected.values())


def test_a_reset_returns_to_the_fitted_start():
    fitted = eata(**LEARNING["eata"])
    fitted.fit_source(batches(2))
    start = fitted.state_dict()
    first = learnt(fitted, batches(3))
    fitted.reset()
    assert all(torch.equal(t, start[n]) for n, t in fitted.state_dict().items())
    assert any(t.any() for n, t in start.items() if "fisher" in n)
    assert all(torch.equal(a, b) for a, b in zip(first, learnt(fitted, batches(3)), strict=True))


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(InvalidValueError, match="no batch; expected source images"):
        eata().fit_source([])
    with pytest.raises(InvalidTypeError, match="no Fisher penalty"):
        safer_tta.adapt(small_net(), "rdumb", seed=0).fit_source(batches(1))
