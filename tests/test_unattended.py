"""Steps that nobody waits for: on the CPU their arithmetic, on CUDA the graphs and the views made ahead."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import safer_tta
from safer_tta.methods import METHODS
from safer_tta.methods._frame.cuda_graphs import EAGER, Unattended
from safer_tta.methods._frame.method import Method
from safer_tta.methods._frame.state import _fuse
from tests.conftest import batches, needs_cuda, same, small_net

REPEATING = sorted(name for name, method in METHODS.items() if method.repeats)
SAFER = {"views": 2}
ANSWERING = {"views": 3, "mixing": {"name": "gate", "teaches": False}}  # what is answered is not what is learnt


def fused(name: str, safer: object = SAFER, **options: object) -> Method:
    method = safer_tta.adapt(small_net().double(), name, safer, seed=0, validate=False, **options)
    _fuse(method.optimizer, True)
    return method


def unattended(method: Method, images: torch.Tensor) -> safer_tta.Prediction:
    with torch.enable_grad():
        return method._unattended.step(method, *method._drawn(images))


def close(one: Method, other: Method, tolerance: float = 1e-6) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.cpu(), theirs[name].cpu(), rtol=tolerance, atol=tolerance, msg=name)


def test_who_repeats():
    assert REPEATING == ["shot_im", "tent"]
    for name in REPEATING:  # as the frame of unattended steps assumes
        assert METHODS[name].optimise is Method.optimise
        assert METHODS[name].commit is Method.commit
        assert METHODS[name].draw is Method.draw


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("safer", [False, SAFER, ANSWERING])
def test_the_same_answers_and_the_same_state(name, safer):
    """What an unattended step does is what a watched one does. In double precision: a bias before a batch norm has no
    gradient but rounding errors, of which Adam makes full steps."""
    watched, alone = safer_tta.adapt(small_net().double(), name, safer, seed=0), fused(name, safer)
    for images in batches(4):
        expected, got = watched(images), unattended(alone, images)
        torch.testing.assert_close(got.probs, expected.probs, rtol=0, atol=1e-6)
        assert got.report.pipelines == expected.report.pipelines
        assert not got.probs.requires_grad
    close(alone, watched)


@pytest.mark.parametrize("name", REPEATING)
def test_an_unhealthy_batch_teaches_nothing_and_is_counted(name, caplog):
    method = fused(name)
    good = batches(3)
    unattended(method, good[0])
    before = method.state_dict()
    broken = torch.full_like(good[0], float("nan"))
    assert not torch.isfinite(unattended(method, broken).probs).all()
    assert same(method.state_dict(), before)
    assert method.refused["losses"] == 1
    assert "1 batch" in caplog.text
    assert torch.isfinite(unattended(method, good[1]).probs).all()
    assert method.refused["losses"] == 1


@pytest.mark.parametrize("name", REPEATING)
def test_gradients_that_are_not_finite_teach_nothing_though_the_loss_is(name):
    method, (first, second) = fused(name), batches(2)
    unattended(method, first)
    before = method.state_dict()
    parameter = method.optimizer.param_groups[0]["params"][0]
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    assert torch.isfinite(unattended(method, second).probs).all()
    hook.remove()
    assert same(method.state_dict(), before)
    assert method.refused["losses"] == 1


@pytest.mark.parametrize("name", REPEATING)
def test_it_goes_on_after_load_reset_and_a_broken_batch(name):
    """The same answers each time, bit for bit: nothing of the steps in between is left anywhere."""
    method, stream = fused(name), batches(5)
    answers = [unattended(method, images).probs for images in stream[:3]]
    saved = method.state_dict()
    unattended(method, torch.full_like(stream[0], torch.nan))
    method.state.generator.set_state(saved["generator"])
    answers += [unattended(method, images).probs for images in stream[3:]]
    method.load_state_dict(saved)
    assert all(torch.equal(unattended(method, images).probs, answers[3 + i]) for i, images in enumerate(stream[3:]))
    method.reset()
    assert all(torch.equal(unattended(method, images).probs, answers[i]) for i, images in enumerate(stream))


def test_health_is_looked_at_now_and_then_without_being_asked():
    method = fused("tent", False)
    broken = torch.full((2, 3, 8, 8), float("nan"))
    for _ in range(70):
        unattended(method, broken)
    assert method._refused["losses"] >= 64


def test_a_copy_starts_with_no_steps_of_its_own():
    method = fused("tent")
    unattended(method, batches(1)[0])
    assert method._unattended.flags
    assert copy.deepcopy(method)._unattended == Unattended()


def test_loading_writes_to_the_tensors_that_are_there():
    """A graph goes on with the tensors it was captured on: a load must not replace them behind its back."""
    method = fused("tent")
    stream = batches(3)
    unattended(method, stream[0])
    saved, generation = method.state_dict(), method.state.generation
    moments = [id(t) for state in method.optimizer.state.values() for t in state.values()]
    unattended(method, stream[1])
    method.load_state_dict(saved)
    assert [id(t) for state in method.optimizer.state.values() for t in state.values()] == moments
    assert method.state.generation == generation
    method.reset()  # to before the first step, where the optimiser had no tensors at all
    assert method.state.generation == generation + 1


# --- on CUDA ----------------------------------------------------------------------------------------------------------


def on_cuda(name: str, safer: object = SAFER, **options: object) -> Method:
    return safer_tta.adapt(small_net(), name, safer, seed=0, validate=False, **options).to("cuda")


@needs_cuda
@pytest.mark.parametrize("name", REPEATING)
def test_a_model_that_is_on_cuda_already_is_adapted_there(name):
    here, moved = safer_tta.adapt(small_net().cuda(), name, SAFER, seed=0, validate=False), on_cuda(name)
    for images in batches(3):
        torch.testing.assert_close(here(images).probs, moved(images).probs, rtol=0, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("name", ["tsd", "t3a"])
def test_sums_on_cuda_do_not_depend_on_their_order(name):
    one, other = on_cuda(name), on_cuda(name)
    for images in batches(6):
        assert torch.equal(one(images).probs, other(images).probs)


def many(count: int) -> list[torch.Tensor]:
    return [*batches(count), batches(1)[0][:3]]


@needs_cuda
@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("safer", [False, SAFER, ANSWERING])
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_learns_as_the_cpu_does(name, safer, compile):
    """Without noise, whose generators differ from device to device."""
    calm = safer and {**safer, "pipeline": {"preset": "released", "max_operators": 1}}
    here, there = safer_tta.adapt(small_net(), name, calm, seed=0), on_cuda(name, calm, compile=compile)
    assert there.unattended()
    for images in many(EAGER + 4):
        torch.testing.assert_close(there(images).probs.cpu(), here(images).probs, rtol=0, atol=2e-3)
    assert bool(there._unattended.graphs) == compile
    if here.predictor.memory is not None:  # a graph writes into it too
        torch.testing.assert_close(there.predictor.memory.seen.cpu(), here.predictor.memory.seen, rtol=0.02, atol=0.02)


@needs_cuda
@pytest.mark.parametrize("name", REPEATING)
def test_a_graph_goes_on_after_load_reset_and_a_broken_batch(name):
    eager, graphed = on_cuda(name), on_cuda(name, compile=True)
    stream = batches(EAGER + 6)
    broken = torch.full_like(stream[0], float("nan"))
    for images in stream[: EAGER + 2]:
        a, b = eager(images), graphed(images)
    kept = b.probs.clone()
    saved = graphed.state_dict()
    for images in [broken, *stream[EAGER + 2 :]]:
        a, b_next = eager(images), graphed(images)
    torch.testing.assert_close(b_next.probs, a.probs, rtol=0, atol=2e-3)
    assert torch.equal(b.probs, kept)  # an answer that was handed out does not change under the user's hands
    assert graphed.refused["losses"] == 1 == eager.refused["losses"]
    graphed.load_state_dict(saved)
    assert not torch.isfinite(graphed(broken).probs).any()
    assert same(graphed.state_dict(), saved)
    graphed.load_state_dict(saved)
    first = [graphed(images).probs for images in stream[EAGER + 2 :]]
    graphed.load_state_dict(saved)
    again = [graphed(images).probs for images in stream[EAGER + 2 :]]
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    eager.reset()
    graphed.reset()
    for images in stream:
        torch.testing.assert_close(graphed(images).probs, eager(images).probs, rtol=0, atol=2e-3)


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_views_made_ahead_change_nothing(compile, tmp_path):
    one, other = (on_cuda("tent", compile=compile) for _ in range(2))
    stream = many(EAGER + 4)
    calls = [one(images) for images in stream]
    streamed = []
    for number, prediction in enumerate(other.stream((images, 0) for images in stream)):
        streamed.append(prediction)
        if number == 2:
            other.save(tmp_path / "state")  # with the next batch already drawn
        if number == 3:
            other.predict(stream[0])
    for a, b in zip(calls, streamed, strict=True):
        assert a.report.pipelines == b.report.pipelines
        torch.testing.assert_close(b.probs, a.probs, rtol=0, atol=1e-3)
    assert torch.equal(one.state_dict()["generator"], other.state_dict()["generator"])
    back = on_cuda("tent", compile=compile).load(tmp_path / "state")
    assert [back(images).report.pipelines for images in stream[3:]] == [p.report.pipelines for p in calls[3:]]


@needs_cuda
def test_a_stream_answers_what_came_before_an_error():
    def source():
        yield from batches(2)
        yield torch.zeros(2, 4, 8, 8)

    answers = []
    with pytest.raises(ValueError, match="Four channels"):
        answers.extend(on_cuda("tent").stream(source()))
    assert len(answers) == 2

    def breaking():
        yield from batches(2)
        raise OSError("the camera is gone")

    answers.clear()
    with pytest.raises(OSError, match="camera"):
        answers.extend(on_cuda("tent").stream(breaking()))
    assert len(answers) == 2


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_waits_for_nothing(compile):
    method = on_cuda("tent", compile=compile, precision="bfloat16")
    stream = [images.cuda() for images in itertools.islice(itertools.cycle(batches(3)), 20)]
    for images in stream:
        method(images)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images in stream:
            method(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_under_a_guard_every_step_is_waited_for():
    assert not safer_tta.Guard(on_cuda("tent")).unattended()


@needs_cuda
def test_back_on_the_cpu_it_goes_on():
    method = on_cuda("tent")
    stream = batches(4)
    method(stream[0])
    method.to("cpu")
    assert not method.unattended()
    for images in stream[1:]:
        assert torch.isfinite(method(images).probs).all()
