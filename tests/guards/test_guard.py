"""The guard: nothing non-finite reaches the weights, collapse is found, and what was learnt from garbage is undone."""

import concurrent.futures
import copy
import itertools

import pytest
import torch

import safer_tta
from safer_tta import methods
from safer_tta.errors import InvalidTypeError
from safer_tta.guards import POLICIES, Alarm, Guard
from tests.conftest import CLASSES, adapt_small, batches, overflow_gradients, same, small_net
from tests.guards.parts import EVERY, Colours, guarded, one_class, quick, states_after


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


@pytest.mark.parametrize(("method", "watch"), [("tent", Guard), ("tent", None), ("sar", None)])
def test_a_non_finite_gradient_teaches_nothing_with_and_without_a_guard(method, watch):
    adapted = adapt_small(method, validate=False)
    ask = watch(adapted) if watch else adapted
    ask(batches(1)[0])
    before = adapted.state_dict()
    hook = overflow_gradients(adapted)
    prediction = ask(batches(1, seed=3)[0])
    hook.remove()
    assert adapted.refused == {"gradients": 1}
    assert not watch or prediction.report.health["non_finite_gradients"] == 1
    assert torch.isfinite(prediction.probs).all()
    assert same(adapted.state_dict(), before)
    ask(batches(1, seed=4)[0])
    assert not same(adapted.state_dict(), before)


def test_non_finite_weights_are_rolled_back():
    guard = guarded()
    start = guard.state_dict()
    guard.method.commit = lambda *_: guard.classifier.model.norm1.weight.fill_(torch.nan)
    prediction = guard(batches(1)[0])
    assert prediction.report.health["non_finite_weights"] == 1
    assert same(guard.state_dict(), start)


@pytest.mark.parametrize("policy", POLICIES)
def test_collapse(policy):
    guard = guarded(policy=policy, window=3, snapshot_every=1)
    start = guard.state_dict()
    *_, healthy, _ = states_after(guard, batches(6))  # the last after which a whole window was healthy
    assert guard.counters["collapses"] == 0
    list(guard.stream([one_class()] * 3))
    assert guard.counters["collapses"] == 1
    assert guard.counters["rollbacks"] == (policy in ("freeze", "rollback"))
    assert same(guard.state_dict(), healthy) == (policy in ("freeze", "rollback"))  # no collapsed weights for good
    assert same(guard.state_dict(), start) == (policy == "reset")
    assert guard.frozen == (policy == "freeze")
    list(guard.stream([one_class()] * 3))
    assert guard.counters["collapses"] == (1 if guard.frozen else 2)  # it cannot learn, so it cannot be sick


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
    list(guard.stream([images] * 7))
    assert guard.counters["collapses"] == 0
    guard(images)
    assert guard.counters["collapses"] == collapsed


def test_no_rollback_returns_into_a_collapse():
    """States that were not judged yet when the collapse was found are dropped."""
    guard = guarded(window=2, snapshot_every=1, least_agreement=0)
    list(guard.stream(batches(4)))
    sick, _ = states_after(guard, [one_class()] * 2)  # after the second it was rolled back
    assert guard.counters["collapses"] == 1
    list(guard.stream(batches(4, seed=2)))
    assert guard.memory.healthy
    while guard.memory.healthy:
        guard.rollback()
        assert not same(guard.state_dict(), sick)


def test_a_rollback_does_not_repeat_views():
    """An attacker who saw them would know them: the generator is not rolled back."""
    guard = guarded(predictor="safer", **EVERY)
    *_, before = states_after(guard, batches(4))
    guard.rollback()
    after = guard.state_dict()
    assert not same(before, after)
    assert torch.equal(before["generator"], after["generator"])


def test_rolling_back_twice_goes_further_back():
    guard = guarded(**EVERY)
    first, second, _ = states_after(guard, batches(3))
    for expected in (second, first):
        guard.rollback()
        assert same(guard.state_dict(), expected)


def test_old_snapshots_lie_further_and_further_apart():
    guard = guarded("none", **EVERY, snapshots=4)
    list(guard.stream(batches(1) * 64))
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


@pytest.mark.parametrize(("seconds", "learns"), [(0.6, False), (2.0, True)])
def test_a_late_guard_answers_without_learning(seconds, learns):
    clock = itertools.count()  # every batch takes 1 s on it
    guard = guarded(seconds=seconds, clock=lambda: float(next(clock)))
    first, second, _ = states_after(guard, batches(3))
    assert same(first, second) != learns
    assert guard.counters["skipped_updates"] == (0 if learns else 2)


def test_saved_time_makes_up_for_lost_time():
    """A batch of 3 s with 1 s allowed: two quick ones are answered only, and then it learns again."""
    now = [0.0]
    guard = guarded(seconds=1.0, clock=lambda: now[0])
    forward, takes = guard.method.forward, iter([3.0, 0.0, 0.0, 0.0])

    def slow(*arguments):
        now[0] += next(takes)
        return forward(*arguments)

    guard.method.forward = slow
    states = [guard.state_dict(), *states_after(guard, batches(4))]
    learnt = [not same(before, after) for before, after in itertools.pairwise(states)]
    assert learnt == [True, False, False, True]
    assert guard.counters["skipped_updates"] == 2


def test_a_healthy_stream_is_answered_as_without_a_guard():
    plain, other = (adapt_small(predictor="safer-g") for _ in range(2))
    watched = Guard(other, largest_share=1.0, least_entropy=0.0)
    for ours, theirs in zip(watched.stream(batches(40)), plain.stream(batches(40), prefetch=False), strict=True):
        assert torch.equal(ours.probs, theirs.probs)
    assert watched.memory.healthy
    assert watched.counters["collapses"] == 0


def test_non_finite_answers_never_count_as_healthy():
    guard = guarded(**EVERY | {"window": 2})
    list(guard.stream(batches(6)))
    guard.classifier.model.norm2.weight.data.fill_(3e38)  # finite, and every answer is not
    guard(batches(1, seed=3)[0])
    assert guard.counters["non_finite_answers"] == 1
    assert guard.counters["rollbacks"] == 1
    assert torch.isfinite(guard(batches(1, seed=4)[0]).probs).all()


def test_non_finite_images_do_not_count_against_the_weights():
    guard = guarded(**EVERY | {"window": 2})
    list(guard.stream([batches(1)[0], torch.full((6, 3, 24, 24), torch.nan)] * 4))
    assert guard.counters["non_finite_answers"] == 4
    assert guard.counters["collapses"] == 0
    assert [when for when, _ in guard.memory.healthy] == [1, 2]  # judged batches alone move the clock


def test_a_few_single_images_of_one_class_are_not_a_collapse():
    guard = guarded("none", window=8, least_images=64)
    list(guard.stream([one_class()[:1]] * 63))
    assert guard.counters["collapses"] == 0
    guard(one_class()[:1])
    assert guard.counters["collapses"] == 1


def test_collapse_is_judged_before_a_periodic_reset():
    guard = guarded(window=3, reset_every=3)
    list(guard.stream([one_class()] * 3))
    assert guard.counters["collapses"] == 1


@pytest.mark.parametrize("back", ["reset", "load", "load_state_dict", "periodic", "collapse"])
def test_no_rollback_goes_back_before_a_reset_or_a_load(back, tmp_path):
    guard = guarded(**EVERY, **{"periodic": {"reset_every": 5}, "collapse": {"policy": "reset"}}.get(back, {}))
    start = guard.state_dict()
    guard.save(tmp_path / "s")
    list(guard.stream(batches(5)))
    if back in ("reset", "load", "load_state_dict"):
        getattr(guard, back)(*{"load": [tmp_path / "s"], "load_state_dict": [start]}.get(back, []))
    elif back == "collapse":
        guard.classifier.model.norm2.weight.data.fill_(3e38)  # finite, and every answer is not
        guard(batches(1)[0])
    guard.rollback()
    assert same(guard.state_dict(), start)


def test_a_non_finite_loss_is_counted():
    guard = guarded()
    forward = guard.method.forward
    guard.method.forward = lambda *a: (step := forward(*a))._replace(loss=step.loss * torch.nan)
    assert guard(batches(1)[0]).report.health["non_finite_losses"] == 1


@pytest.mark.parametrize("watch", [Guard, lambda method: method])
def test_a_refused_second_update_leaves_the_first_and_the_answer(watch):
    """TeSLA's policy learns after the student; when its gradient is not finite, only that update is left out."""
    plain, refused = (adapt_small("tesla") for _ in range(2))
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
        {"reset_every": -1},
        *({n: 0} for n in ("window", "snapshots", "snapshot_every", "reset_every")),
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        guarded(**options)


def test_only_methods_can_be_guarded():
    with pytest.raises(TypeError, match="adapt"):
        Guard(small_net())


@pytest.mark.parametrize(("method", "options"), [("eata", {"margin": 10, "redundancy": 1.0}), ("tent", {})])
def test_after_a_rollback_under_inference_mode_it_can_learn(method, options):
    adapted = adapt_small(method, **options)
    guard = Guard(adapted, least_agreement=0, least_images=1, **EVERY)
    *stream, fifth, last = batches(6)
    with torch.inference_mode():
        list(guard.stream(stream))
        adapted.restore()  # as some methods do themselves: the optimiser's state is gone, and the rollback returns it
        guard.rollback()
        guard(fifth)
    before = adapted.state_dict()
    guard(last)
    assert not same(adapted.state_dict(), before)


def test_other_calls_are_passed_to_the_method_and_return_the_guard(tmp_path):
    guard = guarded()
    assert len(list(guard.stream(batches(2)))) == 2
    guard.save(tmp_path / "s")
    assert guard.state_bytes > 0
    assert guard.predict(batches(1)[0]).probs.shape == (6, CLASSES)
    for returned in (guard.to("cpu"), guard.load(tmp_path / "s"), guard.freeze(), guard.unfreeze()):
        assert returned is guard


def test_evaluation_is_guarded_too():
    guard = guarded(window=3)
    evaluation = guard.evaluate([(images, torch.zeros(6, dtype=torch.long)) for images in [one_class()] * 3])
    assert evaluation.images == 18
    assert guard.counters["batches"] == 3
    assert guard.counters["collapses"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_alarm_is_told_once_for_each_batch_with_trouble(policy):
    alarms = []
    guard = guarded(policy=policy, window=3, on_alarm=alarms.append)
    list(guard.stream(batches(3)))
    assert alarms == []
    list(guard.stream([one_class()] * 3))
    (alarm,) = alarms
    undone = policy in ("rollback", "freeze")
    assert alarm == Alarm(("rollback", "collapse") if undone else ("collapse",), 6, policy, dict(guard.counters))
    guard(torch.full((4, 3, 24, 24), torch.nan))
    frozen = policy == "freeze"  # then nothing is learnt and no loss is refused
    assert alarms[1].what == ("answer not finite",) + (() if frozen else ("loss not finite",))
    assert alarms[1].batch == 7
    assert str(alarms[1]).startswith("batch 7: answer not finite")


def test_an_alarm_comes_when_the_guard_has_dealt_with_it():
    """So the function may use the guard, and an error in it reaches the caller with everything in order."""
    known = []

    def on_alarm(alarm):
        known.append(guard.state_dict())
        guard.freeze()
        raise RuntimeError(str(alarm))

    guard = guarded(window=3, on_alarm=on_alarm)
    start = guard.state_dict()
    with pytest.raises(RuntimeError, match="batch 3: rollback, collapse"):
        list(guard.stream([one_class()] * 3))
    assert same(known[0], start)
    assert guard.frozen
    with pytest.raises(InvalidTypeError, match="on_alarm is 5; expected a function"):
        guarded(on_alarm=5)


def test_a_guard_says_what_it_is_and_what_it_guards():
    shown = repr(guarded(policy="freeze", window=3))
    assert shown.startswith("Guard(policy='freeze', window=3, least_images=1)\ntent(lr=")
    assert shown.endswith(repr(guarded().method))


def test_a_copied_guard_still_refuses_gradients():
    guard = copy.deepcopy(guarded())
    overflow_gradients(guard)
    assert guard(batches(1)[0]).report.health["non_finite_gradients"] == 1


def test_threads_share_a_guard():
    """Batches whose gradient is refused in one thread do not freeze the method under another."""
    guard = guarded(window=1000)
    calls = itertools.count()
    guard.classifier.model.norm1.weight.register_hook(lambda g: g * torch.inf if next(calls) % 5 == 0 else g)
    images = batches(1)[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(guard, [images] * 40))
    assert next(calls) == 40  # every batch reached its backward pass
    assert guard.counters["non_finite_gradients"] == 8
