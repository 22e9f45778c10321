"""What a predictor remembers from batch to batch is state like any other: saved, put back, and moved by nobody else."""

from __future__ import annotations

import copy

import pytest
import torch

import safer_tta
from safer_tta import Safer
from safer_tta.gate import SEEN
from safer_tta.guards.anchor import Anchor
from safer_tta.methods import METHODS
from safer_tta.methods._frame.state import learnt
from safer_tta.pooling import with_original
from tests.conftest import batches, small_net

GATE = {"mixing": "gate"}


def adapted(method: str = "tent", **options: object) -> safer_tta.Method:
    return safer_tta.adapt(small_net(), method, GATE, seed=0, **options)


def seen(method: safer_tta.Method) -> torch.Tensor:
    return method.predictor.memory.seen.clone()


def test_it_grows_by_every_batch_and_is_forgotten_with_the_rest():
    method, counts = adapted(), []
    for images in batches(3):
        method(images)
        counts.append(float(seen(method)[0]))
    size, expected = len(batches(1)[0]), []
    for _ in range(3):
        expected.append(0.8 * ((expected[-1] if expected else 0) + size))
    assert counts == pytest.approx(expected)
    method.restore()
    assert torch.equal(seen(method), torch.zeros(SEEN))
    method(batches(1)[0])
    method.reset()
    assert torch.equal(seen(method), torch.zeros(SEEN))


SOON = {"note": {"every": 4}, "rotta": {"every": 4}, "sotta": {"every": 4, "threshold": 0.0}}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_batch_counts_once_whatever_a_method_looks_at_besides(name, monkeypatch):
    """Memories, teachers, second passes and copies add nothing. MEMO takes every image by itself."""
    method, counted, learnt = adapted(name, **SOON.get(name, {})), 0.0, []
    learn = method.learn
    monkeypatch.setattr(method, "learn", lambda loss: (learnt.append(1), learn(loss)))
    for images in batches(3):
        method(images)
        counted = 0.0 if name == "memo" else 0.8 * (counted + len(images))
        assert float(seen(method)[0]) == pytest.approx(counted)
    assert bool(learnt) == (name in SOON)  # from their memories of images


def test_a_method_that_restores_itself_forgets_it_too():
    method, counts = adapted("rdumb", every=2), []
    for images in batches(4):
        method(images)
        counts.append(float(seen(method)[0]))
    assert counts == pytest.approx([0.8 * len(images), 0, 0.8 * len(images), 0])


def test_it_is_saved_and_goes_on_bit_for_bit(tmp_path):
    stream = batches(5)
    whole = adapted()
    expected = [whole(images).probs for images in stream]
    half = adapted()
    for images in stream[:3]:
        half(images)
    half.save(tmp_path / "state")
    back = adapted().load(tmp_path / "state")
    assert torch.equal(seen(back), seen(half))
    assert all(torch.equal(back(images).probs, answer) for images, answer in zip(stream[3:], expected[3:], strict=True))
    half.predictor.memory.seen.copy_(torch.tensor([200.0, 190.0, 400.0]))  # a hostile stream, long ago
    half.save(tmp_path / "wary")
    wary, calm = (adapted().load(tmp_path / name)(stream[3]).report.signal for name in ("wary", "state"))
    assert (wary > calm + 0.1).all()


@pytest.mark.parametrize("look", ["predict", "predictor", "frozen", "refused", "broken"])
def test_looks_leave_it_alone(look):
    method, images = adapted(), batches(1)[0]
    method(images)
    before = seen(method)
    if look == "predict":
        method.predict(images)
    elif look == "predictor":
        method.predictor(images)
    elif look == "frozen":
        method.freeze()(images)
    elif look == "refused":
        with pytest.raises(ValueError, match="expected"):
            method(images * 2)
    else:
        with torch.no_grad():
            next(method.classifier.norms()[0].parameters()).fill_(float("nan"))
        method(images)
        assert method.refused["losses"] == 1
    assert torch.equal(seen(method), before)


def test_a_copy_has_its_own_and_a_teacher_adds_nothing():
    method, images = adapted(), batches(1)[0]
    other = copy.deepcopy(method)
    other(images)
    assert torch.equal(seen(method), torch.zeros(SEEN))
    assert other.state.models["predictor"] is other.predictor.memory
    teacher = method.predictor.over(copy.deepcopy(method.classifier))
    teacher(images)
    assert torch.equal(seen(method), torch.zeros(SEEN))
    method(images)
    assert torch.equal(teacher.memory.seen, seen(method))  # it goes by the same


def test_two_models_behind_one_predictor_do_not_share_it():
    predictor = Safer(small_net(), mixing="gate", seed=0)
    one, other = (safer_tta.adapt(small_net(), "tent", predictor, seed=0) for _ in range(2))
    one(batches(1)[0])
    assert float(seen(one)[0]) > 0
    assert torch.equal(seen(other), torch.zeros(SEEN))
    assert torch.equal(predictor.memory.seen, torch.zeros(SEEN))


@pytest.mark.parametrize("mixing", [None, "sigmoid", {"name": "gate", "keeps": 0.0}])
def test_most_remember_nothing(mixing):
    method = safer_tta.adapt(small_net(), "tent", {"mixing": mixing}, seed=0)
    assert method.predictor.memory is None
    assert not [name for name in method.state_dict() if name.startswith("predictor")]


def test_a_mixing_may_call_something_else_its_memory():
    class Elsewhere:
        least_views, memory = 1, ("of", "its own")

        def mix(self, base_weights, probs, features):
            return base_weights, torch.zeros_like(base_weights[0])

    method = safer_tta.adapt(small_net(), "tent", {"mixing": Elsewhere()}, seed=0)
    assert method.predictor.memory is None
    method(batches(1)[0])


@pytest.mark.parametrize("name", ["tent", "pl", "cotta", "tesla"])
def test_a_wary_method_predicts_what_it_answers(name):
    """A batch is not judged by itself as if it had come before."""
    method, images = adapted(name), batches(1)[0]
    method.predictor.memory.seen.copy_(torch.tensor([20.0, 18.0, 45.0]))
    looked = method.predict(images)
    answered = method(images)
    torch.testing.assert_close(answered.probs, looked.probs)
    torch.testing.assert_close(answered.report.signal, looked.report.signal)


def test_a_mixing_may_be_learnt_through_what_it_remembers():
    class Multiplies:
        least_views, memory = 1, 1

        def mix(self, base_weights, probs, features):
            return self.remembering(base_weights, probs, features, torch.zeros(1))[:2]

        def remembering(self, base_weights, probs, features, seen):
            alpha = torch.sigmoid(probs[0].amax(dim=-1) * seen[0])
            return with_original(alpha, base_weights), alpha, seen + 1

    method = safer_tta.adapt(small_net(), "tent", {"mixing": Multiplies()}, seed=0)
    for number, images in enumerate(batches(3)):
        method(images)
        assert seen(method).tolist() == [number + 1]
    method.predictor.mixing.remembering = lambda b, p, z, s: (b, b[0], s * float("nan"))
    method(batches(1)[0])
    assert seen(method).tolist() == [3]  # what is no number is not remembered


def test_what_is_remembered_is_no_lesson():
    """A service says whether a batch was learnt from."""
    for name, learns in (("none", False), ("tent", True)):
        method = adapted(name)
        before = method.state_dict()
        method(batches(1)[0])
        assert learnt(before, method.state_dict()) == learns


def test_an_anchor_compares_models_and_not_what_they_remember():
    method, anchor = adapted("none"), Anchor()
    for images in batches(4):
        anchor.offer(images)
    assert anchor.agreement(method) == 1
    wary = torch.tensor([500.0, 480.0, 1300.0])
    method.predictor.memory.seen.copy_(wary)
    assert anchor.agreement(method) == 1
    assert torch.equal(seen(method), wary)
