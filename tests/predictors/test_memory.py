"""What a predictor remembers from batch to batch is state: it is saved and put back, and only learning moves it."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import safer_tta
from safer_tta.guards.anchor import Anchor
from safer_tta.methods import METHODS
from safer_tta.methods._frame.state import learnt
from safer_tta.pooling import Verdict, with_original
from tests.conftest import adapt_small, batches

LONG = 3  # where the count of the gate's long memory stands
DECAY = 0.8 ** (6 / 64)  # of the long memory, over one of the batches here


class OwnMixing:
    """The paper's pooling, as a user would write a mixing; tests change what it remembers."""

    version: ClassVar[int] = 1
    least_views: ClassVar[int] = 1
    preset: ClassVar[str] = "released"
    norm: ClassVar[str | None] = None
    estimates_suspicion: ClassVar[bool] = False

    def memory_size(self, features: int) -> int:
        return 0

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        return Verdict(base, base)


def adapted(method: str = "tent", **options: object) -> safer_tta.Method:
    return adapt_small(method, "safer-g", **options)


def with_mixing(mixing: object) -> safer_tta.Method:
    return adapt_small("tent", {"name": "safer", "mixing": mixing})


def seen(method: safer_tta.Method) -> Tensor:
    return method.predictor.memory.seen.clone()


def count(method: safer_tta.Method) -> float:
    """The images in the gate's long memory, or the first number of another mixing's."""
    numbers = seen(method)
    return float(numbers[LONG if len(numbers) > LONG else 0])


def images_seen(method: safer_tta.Method, stream: list[Tensor]) -> list[float]:
    counts = []
    for images in stream:
        method(images)
        counts.append(count(method))
    return counts


def test_memory_grows_with_every_batch_and_is_forgotten_with_the_rest():
    method = adapted()
    for forget in (method.restore, method.reset):
        expected = [6 * sum(DECAY**age for age in range(1, batch + 1)) for batch in (1, 2, 3)]
        assert images_seen(method, batches(3)) == pytest.approx(expected)
        forget()
        assert not seen(method).any()


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
        assert count(method) == pytest.approx(counted)
    assert bool(updates) == (name in SOON)  # from their memories of images


def test_a_method_that_restores_itself_empties_it():
    once = DECAY * len(batches(1)[0])
    assert images_seen(adapted("rdumb", every=2), batches(4)) == pytest.approx([once, 0, once, 0])


def test_a_wary_method_is_wary_after_a_load_too(tmp_path):
    """The contract of methods has that answers resume bit for bit."""
    *stream, last = batches(4)
    suspicions = []
    method = adapted()
    images_seen(method, stream)
    hostile = seen(method)
    for law in (0, 6):
        hostile[law + LONG : law + LONG + 3] = torch.tensor([200.0, 190.0, 800.0])
    for remembered in (seen(method), hostile):  # a hostile stream, long ago
        method.predictor.memory.seen.copy_(remembered)
        method.save(tmp_path / "state")
        back = adapted().load(tmp_path / "state")
        assert torch.equal(seen(back), remembered)
        suspicions.append(back(last).suspicion)
    assert (suspicions[1] > suspicions[0] + 0.1).all()


def test_only_learning_moves_it(images):
    """The contract of methods has that nothing moves when it predicts, is frozen or refuses a batch."""
    method = adapted()
    method(images)
    before = seen(method)
    method.predictor(images)
    assert torch.equal(seen(method), before)
    with torch.no_grad():
        next(method.classifier.norms()[0].parameters()).fill_(torch.nan)
    method(images)
    assert method.refused["losses"] == 1
    assert torch.equal(seen(method), before)


def test_a_copy_has_its_own_and_a_teacher_adds_nothing(images):
    method = adapted()
    other = copy.deepcopy(method)
    other(images)
    assert not seen(method).any()
    assert other.state.memories["predictor"] is other.predictor.memory
    teacher = method.predictor.fork(copy.deepcopy(method.classifier))
    teacher(images)
    assert not seen(method).any()
    method(images)
    assert torch.equal(teacher.memory.seen, seen(method))  # it looks with the same memory


class Elsewhere(OwnMixing):
    memory = ("something else", "by that name")


@pytest.mark.parametrize("mixing", ["none", "sigmoid", "step", "linear", Elsewhere()])
def test_other_mixings_remember_nothing(mixing):
    method = with_mixing(mixing)
    method(batches(1)[0])
    assert method.predictor.memory is None
    assert not [name for name in method.state_dict() if name.startswith("predictor")]


class Multiplies(OwnMixing):
    """Weighs by what it remembers, so that gradients pass through its memory."""

    def memory_size(self, features: int) -> int:
        return 1

    def weigh(self, base: Tensor, probs: Tensor, features: Tensor, memory: Tensor) -> Verdict:
        weights = with_original(torch.sigmoid(probs[0].amax(dim=-1) * memory[0]), base)
        return Verdict(weights, weights, memory=memory + 1)


def test_methods_learn_through_what_a_mixing_remembers(monkeypatch):
    method = with_mixing(Multiplies())
    assert images_seen(method, batches(3)) == [1, 2, 3]
    monkeypatch.setattr(Multiplies, "weigh", lambda self, b, p, z, memory: Verdict(b, b, memory=memory * torch.nan))
    method(batches(1)[0])
    assert seen(method).tolist() == [3]  # NaN is not remembered


@pytest.mark.usefixtures("learn_from_few_classes")
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
    wary = seen(method)
    wary[:12] = torch.tensor([500.0, 480.0, 1300.0]).repeat(4)
    method.predictor.memory.seen.copy_(wary)
    assert anchor.agreement(method) == 1
    assert torch.equal(seen(method), wary)
