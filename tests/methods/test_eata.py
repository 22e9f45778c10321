"""Test how EATA is fitted to source images before a stream starts."""

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.conftest import LEARNING, adapt_small, batches, identical, learnt


def eata() -> safer_tta.Method:
    return adapt_small("eata", "safer-g", **LEARNING["eata"])


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


@pytest.mark.usefixtures("learn_from_few_classes")
def test_a_reset_returns_to_the_fitted_start_after_a_load_too(tmp_path):
    fitted = eata()
    fitted.fit_source(batches(2))
    start = fitted.state_dict()
    assert any(t.any() for n, t in start.items() if "fisher" in n)
    fitted.save(tmp_path / "fitted.safetensors")
    first = learnt(fitted, batches(3))
    for adapted in (fitted, eata().load(tmp_path / "fitted.safetensors")):
        adapted.reset()
        assert identical(adapted.state_dict(), start)
        assert all(torch.equal(a, b) for a, b in zip(first, learnt(adapted, batches(3)), strict=True))


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(InvalidValueError, match="no batch; expected source images"):
        eata().fit_source([])
    with pytest.raises(InvalidTypeError, match="no Fisher penalty"):
        adapt_small("rdumb").fit_source(batches(1))
