"""What a predictor remembers from batch to batch is state: it is saved and put back, and only learning moves it."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import safer_tta
from safer_tta import Safer
from safer_tta.gate import MEMORY_SIZE
from safer_tta.guards.anchor import Anchor
from safer_tta.methods import METHODS
from safer_tta.methods._frame.state import learnt
from safer_tta.pooling import Verdict, with_original
from tests.conftest import batches, small_net

EMPTY = torch.zeros(MEMORY_SIZE)
DECAY = 0.8  # of the gate's memory, from one batch to the next


class OwnMixing:
    """The paper's pooling, as a user would write a mixing; tests change what it remembers."""

    version: ClassVar[int] = 1
    least_views: ClassVar[int] = 1
    preset: ClassVar[str] = "released"
    memory_size: ClassVar[int] = 0
    estimates_suspicion: ClassVar[bool] = False

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        return Verdict(base, base)


def adapted(method: str = "tent", predictor: object = "safer-g", **options: object) -> safer_tta.Method:
    return safer_tta.adapt(small_net(), method, predictor, seed=0, **options)


def with_mixing(mixing: object) -> safer_tta.Method:
    return adapted(predictor={"name": "safer", "mixing": mixing})


def seen(method: safer_tta.Method) -> Tensor:
    return method.predictor.memory.seen.clone()


def images_seen(method: safer_tta.Method, stream: list[Tensor]) -> list[float]:
    """The decayed count of images in the memory, after each batch of a stream."""
    counts = []
    for images in stream:
        method(images)
        counts.append(float(seen(method)[0]))
    return counts


def test_memory_grows_with_every_batch_and_is_forgotten_with_the_rest():
    method, stream, expected = adapted(), batches(3), []
    for images in stream:
        expected.append(DECAY * ((expected[-1] if expected else 0) + len(images)))
    assert images_seen(method, stream) == pytest.approx(expected)
    for forget in (method.restore, method.reset):
        assert seen(method)[0] > 0
        forget()
        assert torch.equal(seen(method), EMPTY)
        method(stream[0])


SOON = {"note": {"every": 4}, "rotta": {"every": 4}, "sotta": {"every": 4, "threshold": 0.0}}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_batch_counts_once_in_every_method(name, monkeypatch):
    """Memories of images, teachers, second passes and copies add nothing. MEMO forgets after every image."""
    method, counted, updates = adapted(name, **SOON.get(name, {})), 0.0, []
    learn = method.learn
    monkeypatch.setattr(method, "learn", lambda loss: (updates.append(1), learn(loss)))
    for images in batches(3):
        method(images)
        counted = 0.0 if name == "memo" else DECAY * (counted + len(images))
        assert float(seen(method)[0]) == pytest.approx(counted)
    assert bool(updates) == (name in SOON)  # from their memories of images


def test_a_method_that_restores_itself_empties_it():
    count = DECAY * len(batches(1)[0])
    assert images_seen(adapted("rdumb", every=2), batches(4)) == pytest.approx([count, 0, count, 0])


def test_it_is_saved_and_resumed_bit_for_bit(tmp_path):
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
    wary, calm = (adapted().load(tmp_path / name)(stream[3]).suspicion for name in ("wary", "state"))
    assert (wary > calm + 0.1).all()


@pytest.mark.parametrize("look", ["predict", "predictor", "frozen", "refused", "broken"])
def test_only_learning_moves_it(look):
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
    assert torch.equal(seen(method), EMPTY)
    assert other.state.memories["predictor"] is other.predictor.memory
    teacher = method.predictor.fork(copy.deepcopy(method.classifier))
    teacher(images)
    assert torch.equal(seen(method), EMPTY)
    method(images)
    assert torch.equal(teacher.memory.seen, seen(method))  # it looks with the same memory


def test_two_models_behind_one_predictor_do_not_share_it():
    predictor = Safer(small_net(), mixing="gate", seed=0)
    one, other = adapted(predictor=predictor), adapted(predictor=predictor)
    one(batches(1)[0])
    assert float(seen(one)[0]) > 0
    assert torch.equal(seen(other), EMPTY)
    assert torch.equal(predictor.memory.seen, EMPTY)


@pytest.mark.parametrize("mixing", ["none", "sigmoid", "step", "linear"])
def test_other_mixings_remember_nothing(mixing):
    method = with_mixing(mixing)
    assert method.predictor.memory is None
    assert not [name for name in method.state_dict() if name.startswith("predictor")]


def test_a_mixing_may_call_something_else_its_memory():
    class Elsewhere(OwnMixing):
        memory = ("of", "its own")

    method = with_mixing(Elsewhere())
    assert method.predictor.memory is None
    method(batches(1)[0])


@pytest.mark.parametrize("name", ["tent", "pl", "cotta", "tesla"])
def test_a_wary_method_predicts_what_it_answers(name):
    """A batch is judged by the memory of those before it, and not by its own."""
    method, images = adapted(name), batches(1)[0]
    method.predictor.memory.seen.copy_(torch.tensor([20.0, 18.0, 45.0]))
    foreseen = method.predict(images)
    answered = method(images)
    torch.testing.assert_close(answered.probs, foreseen.probs)
    torch.testing.assert_close(answered.suspicion, foreseen.suspicion)


class Multiplies(OwnMixing):
    """Weighs by what it remembers, so that gradients pass through its memory."""

    memory_size = 1

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        weights = with_original(torch.sigmoid(probs[0].amax(dim=-1) * memory[0]), base)
        return Verdict(weights, weights, memory=memory + 1)


def test_methods_learn_through_what_a_mixing_remembers(monkeypatch):
    method = with_mixing(Multiplies())
    assert images_seen(method, batches(3)) == [1, 2, 3]
    monkeypatch.setattr(Multiplies, "weigh", lambda self, b, p, z, memory: Verdict(b, b, memory=memory * torch.nan))
    method(batches(1)[0])
    assert seen(method).tolist() == [3]  # NaN is not remembered


@pytest.mark.parametrize(("name", "learns"), [("none", False), ("tent", True)])
def test_remembering_is_not_learning(name, learns):
    """A service tells its user whether a batch was learnt from."""
    method = adapted(name)
    before = method.state_dict()
    method(batches(1)[0])
    assert learnt(before, method.state_dict()) == learns


def test_an_anchor_compares_models_without_their_memories():
    method, anchor = adapted("none"), Anchor()
    for images in batches(4):
        anchor.offer(images)
    assert anchor.agreement(method) == 1
    wary = torch.tensor([500.0, 480.0, 1300.0])
    method.predictor.memory.seen.copy_(wary)
    assert anchor.agreement(method) == 1
    assert torch.equal(seen(method), wary)
