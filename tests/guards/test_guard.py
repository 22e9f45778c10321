"""The guard: nothing non-finite reaches the weights, collapse is found, and what was learnt from garbage is undone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import methods
from safer_tta.guards import POLICIES, Guard
from tests.conftest import CLASSES, batches, same, small_net
from tests.guards.parts import guarded, one_class, quick


@pytest.mark.parametrize("method", methods.METHODS)
def test_non_finite_images_change_no_tensor(method):
    """Between good batches, so that there are moments and memories to spoil (2,000 batches in `make soak`)."""
    guard = quick(method, window=1000)
    broken = torch.full((4, 3, 16, 16), torch.nan)
    for images in batches(3, size=4, side=16):
        guard(images)
        before = guard.state_dict()
        assert not torch.isfinite(guard(broken).probs).any()
        assert same(guard.state_dict(), before)
    assert guard.counters["non_finite_answers"] == guard.counters["non_finite_losses"] == 3


@pytest.mark.parametrize("method", methods.METHODS)
def test_constant_images_give_finite_numbers(method):
    """No spread in an image, in a channel or over a batch: what divides by one must not need the guard."""
    guard = quick(method, window=1000)
    for number in range(11):
        assert torch.isfinite(guard(torch.full((4, 3, 16, 16), number / 10)).probs).all()
    assert {name: n for name, n in guard.counters.items() if n} == {"batches": 11}
    assert guard.state.finite()


@pytest.mark.parametrize("method", methods.METHODS)
def test_a_repeated_image_is_a_collapse_and_rolled_back(method):
    guard = quick(method, window=4, least_images=16)
    start = guard.state_dict()
    for number in range(1, 9):
        guard(one_class())
        assert guard.counters["collapses"] == guard.counters["rollbacks"] == number // 4
        if number % 4 == 0:  # nothing was known to be healthy: all the way back
            assert same(guard.state_dict(), start)


def test_a_non_finite_gradient_is_not_used():
    guard = guarded("tent")
    guard(batches(1)[0])
    before = guard.state_dict()
    hook = guard.classifier.model.norm1.weight.register_hook(lambda g: g * torch.inf)
    prediction = guard(batches(1, seed=3)[0])
    hook.remove()
    assert prediction.report.health["non_finite_gradients"] == 1
    assert torch.isfinite(prediction.probs).all()
    assert same(guard.state_dict(), before)


@pytest.mark.parametrize("method", ["tent", "sar"])
def test_a_non_finite_gradient_teaches_nothing_without_a_guard(method):
    adapted = safer_tta.adapt(small_net(), method, "plain", seed=0, validate=False)
    adapted(batches(1)[0])
    before = adapted.state_dict()
    hook = adapted.classifier.model.norm1.weight.register_hook(lambda g: g * torch.inf)
    prediction = adapted(batches(1, seed=3)[0])
    hook.remove()
    assert adapted.refused == {"gradients": 1}
    assert torch.isfinite(prediction.probs).all()
    assert same(adapted.state_dict(), before)
    adapted(batches(1, seed=4)[0])
    assert not same(adapted.state_dict(), before)


def test_non_finite_weights_are_rolled_back():
    guard = guarded("tent")
    start = guard.state_dict()
    guard.method.commit = lambda *_: guard.classifier.model.norm1.weight.fill_(torch.nan)
    prediction = guard(batches(1)[0])
    assert prediction.report.health["non_finite_weights"] == 1
    assert same(guard.state_dict(), start)


@pytest.mark.parametrize("policy", POLICIES)
def test_collapse(policy):
    guard = guarded("tent", policy=policy, window=3, snapshot_every=1)
    start = guard.state_dict()
    states = []
    for images in batches(6):
        guard(images)
        states.append(guard.state_dict())
    assert guard.counters["collapses"] == 0
    for _ in range(3):
        guard(one_class())
    healthy = states[4]  # the last after which a whole window was healthy
    assert guard.counters["collapses"] == 1
    if policy == "freeze":
        assert guard.frozen
        assert same(guard.state_dict(), healthy)  # not the collapsed weights for good
        for _ in range(3):
            guard(one_class())
        assert guard.counters["collapses"] == 1  # it cannot learn, so it cannot be sick
    if policy == "reset":
        assert same(guard.state_dict(), start)
    if policy == "rollback":
        assert same(guard.state_dict(), healthy)
        assert guard.counters["rollbacks"] == 1
    if policy == "warn":
        assert not same(guard.state_dict(), healthy)


class Colours(nn.Module):
    """Answers with the channel that is brightest; the brighter, the surer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, CLASSES, bias=False)
        self.fc.weight.data = torch.eye(CLASSES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(100 * x.mean(dim=(2, 3)))


@pytest.mark.parametrize(
    ("brightness", "of_one_class", "collapsed"),
    [
        (1.0, 17, True),  # H(0.85, 0.15) is 0.26 of ln 5, below 0.3, though no class has nine answers of ten
        (1.0, 16, False),  # H(0.8, 0.2) is 0.31 of it
        (0.02, 19, True),  # unsure answers: their mean is spread, but nearly all name one class
        (0.02, 18, False),  # nine of ten and no more
    ],
)
def test_collapse_is_detected_by_share_and_spread(brightness, of_one_class, collapsed):
    """By default: eight batches of too little spread, or of more than nine tenths for one class."""
    guard = Guard(safer_tta.adapt(Colours(), "none", "plain", seed=0))
    images = torch.zeros(20, 3, 8, 8)
    images[:of_one_class, 0] = images[of_one_class:, 1] = brightness
    for _ in range(7):
        guard(images)
    assert guard.counters["collapses"] == 0
    guard(images)
    assert guard.counters["collapses"] == collapsed


def test_no_rollback_returns_into_a_collapse():
    """States that nobody had judged yet when it was found are given up with it."""
    guard = guarded("tent", window=2, snapshot_every=1, least_agreement=0)
    for images in batches(4):
        guard(images)
    sick = []
    for _ in range(2):
        guard(one_class())
        sick.append(guard.state_dict())
    assert guard.counters["collapses"] == 1
    sick.pop()  # by then it was rolled back
    for images in batches(4, seed=2):
        guard(images)
    assert guard.memory.healthy
    while guard.memory.healthy:
        guard.rollback()
        assert not any(same(guard.state_dict(), state) for state in sick)


def test_a_rollback_does_not_repeat_views():
    """An attacker who saw them would know them: the generator is not rolled back."""
    guard = guarded("tent", predictor="safer", window=1, snapshot_every=1, least_entropy=0.0, largest_share=1.0)
    for images in batches(4):
        guard(images)
    before = guard.state_dict()
    guard.rollback()
    after = guard.state_dict()
    assert not same(before, after)
    assert torch.equal(before["generator"], after["generator"])


def test_rolling_back_twice_goes_further_back():
    guard = guarded("tent", window=1, snapshot_every=1, least_entropy=0.0, largest_share=1.0)
    states = []
    for images in batches(3):
        guard(images)
        states.append(guard.state_dict())
    guard.rollback()
    assert same(guard.state_dict(), states[1])
    guard.rollback()
    assert same(guard.state_dict(), states[0])


def test_old_snapshots_lie_further_and_further_apart():
    guard = guarded("none", window=1, snapshot_every=1, least_entropy=0.0, largest_share=1.0, snapshots=4)
    images = batches(1)[0]
    for _ in range(64):
        guard(images)
    ages = [64 - when for when, _ in guard.memory.healthy]
    assert len(ages) == 4
    assert ages[-1] == 1
    assert ages[0] > 16
    assert all(older > 1.4 * newer for older, newer in itertools.pairwise(ages)), ages


def test_periodic_reset():
    guard = guarded("tent", reset_every=3)
    start = guard.state_dict()
    for number, images in enumerate(batches(6), start=1):
        guard(images)
        moved = [n for n in start if n.startswith("model.") and not torch.equal(guard.state_dict()[n], start[n])]
        assert bool(moved) == (number % 3 != 0)
    assert guard.counters["periodic_resets"] == 2


def test_a_late_guard_answers_without_learning():
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    guard = guarded("tent", seconds=0.6, clock=clock)  # every batch takes 1 s on this clock
    guard(batches(1)[0])
    learnt = guard.state_dict()
    prediction = guard(batches(1)[0])
    assert same(guard.state_dict(), learnt)
    assert prediction.report.health["skipped_updates"] == 1
    relaxed = guarded("tent", seconds=2.0, clock=clock)
    for images in batches(3):
        relaxed(images)
    assert relaxed.counters["skipped_updates"] == 0


def test_saved_time_makes_up_for_lost_time():
    """A batch of 3 s with 1 s allowed: two quick ones are answered only, and then it learns again."""
    now = [0.0]
    guard = guarded("tent", seconds=1.0, clock=lambda: now[0])
    forward, takes = guard.method.forward, iter([3.0, 0.0, 0.0, 0.0])

    def slow(*arguments):
        now[0] += next(takes)
        return forward(*arguments)

    guard.method.forward = slow
    learnt = []
    for images in batches(4):
        before = guard.state_dict()
        guard(images)
        learnt.append(not same(guard.state_dict(), before))
    assert learnt == [True, False, False, True]
    assert guard.counters["skipped_updates"] == 2


def test_a_healthy_stream_is_answered_as_without_a_guard():
    """With the guard or without: the same answers, bit for bit."""
    plain = safer_tta.adapt(small_net(), "tent", seed=0)
    watched = Guard(safer_tta.adapt(small_net(), "tent", seed=0), largest_share=1.0, least_entropy=0.0)
    for images in batches(40):
        assert torch.equal(plain(images).probs, watched(images).probs)
    assert watched.memory.healthy
    assert watched.counters["collapses"] == 0


def test_non_finite_answers_never_count_as_healthy():
    guard = guarded("tent", window=2, snapshot_every=1, least_entropy=0.0, largest_share=1.0)
    for images in batches(6):
        guard(images)
    guard.classifier.model.norm2.weight.data.fill_(3e38)  # finite, and every answer is not
    guard(batches(1, seed=3)[0])
    assert guard.counters["non_finite_answers"] == 1
    assert guard.counters["rollbacks"] == 1
    assert torch.isfinite(guard(batches(1, seed=4)[0]).probs).all()


def test_non_finite_images_do_not_count_against_the_weights():
    guard = guarded("tent", window=2, snapshot_every=1, least_entropy=0.0, largest_share=1.0)
    for _ in range(4):
        guard(batches(1)[0])
        guard(torch.full((6, 3, 24, 24), torch.nan))
    assert guard.counters["non_finite_answers"] == 4
    assert guard.counters["collapses"] == 0
    assert [when for when, _ in guard.memory.healthy] == [1, 2]  # judged batches alone move the clock


def test_a_few_single_images_of_one_class_are_not_a_collapse():
    guard = guarded("none", window=8, least_images=64)
    for _ in range(63):
        guard(one_class()[:1])
    assert guard.counters["collapses"] == 0
    guard(one_class()[:1])
    assert guard.counters["collapses"] == 1


def test_collapse_is_judged_before_a_periodic_reset():
    guard = guarded("tent", window=3, reset_every=3)
    for _ in range(3):
        guard(one_class())
    assert guard.counters["collapses"] == 1


@pytest.mark.parametrize("back", ["reset", "load", "load_state_dict", "periodic", "collapse"])
def test_no_rollback_goes_back_before_a_reset_or_a_load(back, tmp_path):
    options = {"window": 1, "snapshot_every": 1, "least_entropy": 0.0, "largest_share": 1.0}
    options |= {"periodic": {"reset_every": 5}, "collapse": {"policy": "reset"}}.get(back, {})
    guard = guarded("tent", **options)
    start = guard.state_dict()
    guard.save(tmp_path / "s")
    for images in batches(5):
        guard(images)
    if back == "load":
        guard.load(tmp_path / "s")
    elif back == "load_state_dict":
        guard.load_state_dict(start)
    elif back == "reset":
        guard.reset()
    elif back == "collapse":
        guard.classifier.model.norm2.weight.data.fill_(3e38)  # finite, and every answer is not
        guard(batches(1)[0])
    guard.rollback()
    assert same(guard.state_dict(), start)


def test_a_non_finite_loss_is_counted():
    guard = guarded("tent")
    forward = guard.method.forward
    guard.method.forward = lambda *a: (step := forward(*a))._replace(loss=step.loss * torch.nan)
    assert guard(batches(1)[0]).report.health["non_finite_losses"] == 1


@pytest.mark.parametrize("watch", [Guard, lambda method: method])
def test_a_refused_second_update_leaves_the_first_and_the_answer(watch):
    """TeSLA's policy learns after the student; when its gradient is not finite, only that update is left out."""
    plain, refused = (safer_tta.adapt(small_net(), "tesla", "plain", seed=0) for _ in range(2))
    refused.policy.strength.register_hook(lambda g: g * torch.inf)
    images = batches(1)[0]
    assert torch.equal(plain(images).probs, watch(refused)(images).probs)
    assert refused.refused == {"gradients": 1}
    model, other = plain.state_dict(), refused.state_dict()
    assert all(torch.equal(model[n], other[n]) for n in model if n.startswith(("model.", "teacher.")))
    assert torch.equal(other["policy.strength"], torch.zeros_like(other["policy.strength"]))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "hope"},
        {"window": 0},
        {"snapshots": 0},
        {"snapshot_every": 0},
        {"reset_every": 0},
        {"reset_every": -1},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        guarded(**options)


def test_only_methods_can_be_guarded():
    with pytest.raises(TypeError, match="adapt"):
        Guard(small_net())
