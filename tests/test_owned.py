"""Who owns what: nothing that a method keeps is a caller's tensor, and nothing it hands out is its own."""

from __future__ import annotations

import pytest
import torch

import safer_tta
from safer_tta import methods
from safer_tta.guards.anchor import Anchor
from tests.test_contract import classifier


def _batch(seed: int, size: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["note", "rotta", "sotta"])
def test_a_memory_outlives_the_buffer_that_images_came_in(method):
    """A camera's loop: one image at a time, always in the same buffer."""
    unsure = {"threshold": 0.01} if method == "sotta" else {}  # it remembers only what it is sure of
    adapted = safer_tta.adapt(classifier(), method, safer=False, seed=0, **unsure)
    buffer = _batch(0, 1).float() / 255
    first = buffer.clone()
    for seed in range(1, 4):
        adapted(buffer)
        held = adapted.state.memory["memory_image"]
        if len(held):
            assert torch.equal(held[0], first[0].to(held.dtype)), "the first image is still the first image"
        buffer.copy_(_batch(seed, 1).float() / 255)
    assert len(adapted.state.memory["memory_image"]) > 1


def test_an_anchor_outlives_the_buffer_that_images_came_in():
    anchor, buffer = Anchor(8), _batch(0)
    first = buffer.clone()
    anchor.offer(buffer)
    buffer.zero_()
    assert torch.equal(anchor.images, first)


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_an_answer_holds_nothing_that_a_method_keeps(method):
    adapted = safer_tta.adapt(classifier(), method, safer=method != "memo", seed=0)
    for seed in range(2):
        prediction = adapted(_batch(seed))
    kept = {t.untyped_storage().data_ptr() for t in adapted.state.memory.values() if t.numel()}
    assert prediction.kept == {}
    handed = [prediction.probs, prediction.logits, prediction.features, *vars(prediction.report).values()]
    assert not kept & {t.untyped_storage().data_ptr() for t in handed if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize(("method", "options"), [("eata", {"margin": 10, "redundancy": 1.0}), ("tent", {})])
def test_a_rollback_under_inference_mode_leaves_a_method_that_can_learn(method, options):
    adapted = safer_tta.adapt(classifier(), method, safer=False, seed=0, **options)
    watchful = {"window": 1, "least_images": 1, "snapshot_every": 1, "least_entropy": 0, "largest_share": 1.0}
    guarded = safer_tta.Guard(adapted, least_agreement=0, **watchful)
    with torch.inference_mode():
        for seed in range(4):
            guarded(_batch(seed))
        adapted.restore()  # as some methods do by themselves: the optimiser's state is gone, and comes back
        guarded.rollback()
        guarded(_batch(4))
    before = adapted.state_dict()
    guarded(_batch(5))
    assert any(not torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())


# --- what a reversed signal means -----------------------------------------------------------------------------------


def test_suspicion_is_the_larger_the_worse_whichever_way_the_signal_points():
    """Services abstain, and rows detect, by large values."""
    options = {"signal": "orig_margin", "tau": 0.2}
    mixings = [{**options, "higher_is_suspicious": higher} for higher in (True, False)]
    network = classifier().eval()
    up, down = (safer_tta.Safer(network, mixing=mixing, seed=0)(_batch(0)) for mixing in mixings)
    assert torch.equal(up.report.signal, -down.report.signal)
    order = down.report.signal.argsort()
    assert (down.report.weights[0][order].diff() <= 0).all(), "the more suspicious, the less the original counts"


# --- fitting to source images ---------------------------------------------------------------------------------------


def test_fitting_to_source_images_sees_other_views_of_every_batch_and_leaves_the_stream_as_it_was(monkeypatch):
    fitted, other = (safer_tta.adapt(classifier(), "eata", seed=0) for _ in range(2))
    drawn = []
    real = fitted.predictor.draw
    monkeypatch.setattr(fitted.predictor, "draw", lambda images: drawn.append(real(images)) or drawn[-1])
    fitted.fit_source([_batch(0), _batch(1)])
    monkeypatch.undo()
    assert drawn[0].names != drawn[1].names
    assert torch.equal(fitted.predictor.generator.get_state(), other.predictor.generator.get_state())


def test_fitting_to_source_images_passes_over_norms_that_answer_nothing():
    class Auxiliary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, 2), torch.nn.BatchNorm2d(8)
            self.unused, self.head = torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(images)).relu().mean((2, 3)))

    adapted = safer_tta.adapt(Auxiliary(), "eata", seed=0)
    adapted.fit_source([_batch(0)])
    found = [bool(adapted.state.memory[f"fisher{i}"].any()) for i in range(4)]
    assert found == [True, True, False, False]
