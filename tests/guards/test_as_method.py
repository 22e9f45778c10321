"""Test that a guarded method is used as any other: streams, and callers in inference mode."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools

import pytest
import torch

import safer_tta
from safer_tta import Guard
from tests.conftest import CLASSES, batches, small_net
from tests.guards.parts import guarded as guard_of


def test_a_guard_streams_as_its_method_does(model):
    guarded, method = Guard(safer_tta.adapt(model, seed=0)), safer_tta.adapt(model, seed=0)
    streams = (adapted.stream(batches(2), prefetch=False) for adapted in (guarded, method))
    for ours, theirs in zip(*streams, strict=True):
        assert torch.equal(ours.probs, theirs.probs)


@pytest.mark.parametrize(("method", "options"), [("eata", {"margin": 10, "redundancy": 1.0}), ("tent", {})])
def test_after_a_rollback_under_inference_mode_it_can_learn(method, options):
    adapted = safer_tta.adapt(small_net(), method, "plain", seed=0, **options)
    frequent = {"window": 1, "least_images": 1, "snapshot_every": 1, "least_entropy": 0, "largest_share": 1.0}
    guarded = Guard(adapted, least_agreement=0, **frequent)
    *stream, last = batches(6)
    with torch.inference_mode():
        for images in stream[:4]:
            guarded(images)
        adapted.restore()  # as some methods do themselves: the optimiser's state is gone, and the rollback returns it
        guarded.rollback()
        guarded(stream[4])
    before = adapted.state_dict()
    guarded(last)
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items() if name != "generator"
    )


def test_other_calls_are_passed_to_the_method(tmp_path):
    guard = guard_of("tent")
    guard(batches(1)[0])
    guard.save(tmp_path / "s")
    assert guard.state_bytes > 0
    assert guard.predict(batches(1)[0]).probs.shape == (6, CLASSES)
    assert len(list(guard.stream(batches(2)))) == 2


def test_what_returns_the_method_returns_the_guard(tmp_path):
    guard = guard_of("tent")
    guard.save(tmp_path / "s")
    for returned in (guard.to("cpu"), guard.load(tmp_path / "s"), guard.freeze(), guard.unfreeze()):
        assert returned is guard


def test_a_copied_guard_still_refuses_gradients():
    guard = copy.deepcopy(guard_of("tent"))
    guard.classifier.model.norm1.weight.register_hook(lambda g: g * torch.inf)
    assert guard(batches(1)[0]).report.health["non_finite_gradients"] == 1


def test_threads_share_a_guard():
    """Batches whose gradient is refused in one thread do not freeze the method under another."""
    guard = guard_of("tent", window=1000)
    calls = itertools.count()
    guard.classifier.model.norm1.weight.register_hook(lambda g: g * torch.inf if next(calls) % 5 == 0 else g)
    images = batches(1)[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(guard, [images] * 40))
    assert next(calls) == 40  # every batch reached its backward pass
    assert guard.counters["non_finite_gradients"] == 8
