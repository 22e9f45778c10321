"""Test steps that the host does not wait for: their arithmetic on the CPU; graphs and prefetched views on CUDA."""

import copy
import itertools

import pytest
import torch

import safer_tta
from safer_tta._internal.optimizers import fuse
from safer_tta.errors import InvalidValueError
from safer_tta.methods import METHODS, learnt, moved
from safer_tta.methods._frame.cuda_graphs import EAGER, MOST_FLAGS
from safer_tta.methods._frame.method import Method
from safer_tta.models import statistics
from tests.conftest import adapt_small, batches, needs_cuda, overflow_gradients, same, small_net

REPEATING = sorted(name for name, method in METHODS.items() if method.repeats)
SAFER = {"name": "safer", "views": 2}
GATE = {"name": "safer-g", "views": 3}  # what it answers is not what methods learn from


def fused(name: str, predictor: object = SAFER) -> Method:
    method = safer_tta.adapt(small_net().double(), name, predictor, seed=0, validate=False)
    fuse(method.optimizer, True)
    return method


def step(method: Method, images: torch.Tensor) -> safer_tta.Prediction:
    """Adapt to a batch as on CUDA, where nothing waits for the device."""
    with torch.enable_grad():
        return method.accelerator.step(*method.draw_batch(images))


def test_repeating_methods_have_no_steps_of_their_own():
    assert REPEATING == ["shot_im", "tent"]
    for name in REPEATING:
        assert METHODS[name].optimise is Method.optimise
        assert METHODS[name].commit is Method.commit
        assert METHODS[name].draw is Method.draw


@pytest.mark.usefixtures("learn_from_few_classes")
@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("predictor", ["plain", SAFER, GATE])
def test_asynchronous_steps_answer_and_learn_as_others_do(name, predictor):
    """In double precision: a bias before a batch norm has no gradient but rounding errors, which steer Adam."""
    ordinary, asynchronous = safer_tta.adapt(small_net().double(), name, predictor, seed=0), fused(name, predictor)
    for images in batches(4):
        expected, got = ordinary(images), step(asynchronous, images)
        torch.testing.assert_close(got.probs, expected.probs, rtol=0, atol=1e-6)
        assert got.report.pipelines == expected.report.pipelines
        assert not got.probs.requires_grad
    torch.testing.assert_close(asynchronous.state_dict(), ordinary.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("take", [Method.__call__, step])
def test_a_batch_of_too_few_classes_is_noted_but_moves_no_weight(name, take, monkeypatch):
    """Not even by the momentum of the steps before it."""
    method, (first, second, third) = fused(name, GATE), batches(3)
    monkeypatch.setattr(statistics, "LEAST_DIVERSE", 0.0)
    fresh = method.state_dict()
    take(method, first)
    assert learnt(fresh, method.state_dict())
    monkeypatch.setattr(statistics, "LEAST_DIVERSE", 1e9)
    before = method.state_dict()
    take(method, second)
    take(method, third)
    assert not learnt(before, method.state_dict())
    assert moved(before, method.state_dict())


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("broken", ["images", "gradients"])
def test_an_unhealthy_batch_teaches_nothing_and_is_counted(name, broken, caplog):
    method, (first, second, third) = fused(name), batches(3)
    step(method, first)
    before = method.state_dict()
    if broken == "images":
        assert not torch.isfinite(step(method, torch.full_like(second, torch.nan)).probs).all()
    else:  # though the loss is finite
        hook = overflow_gradients(method)
        assert torch.isfinite(step(method, second).probs).all()
        hook.remove()
    assert same(method.state_dict(), before)
    assert method.refused["losses"] == 1
    assert "1 batch" in caplog.text
    assert torch.isfinite(step(method, third).probs).all()
    assert method.refused["losses"] == 1


@pytest.mark.parametrize("name", REPEATING)
def test_nothing_is_left_of_steps_before_a_load_or_a_reset(name):
    method, stream = fused(name), batches(5)
    answers = [step(method, images).probs for images in stream[:3]]
    saved = method.state_dict()
    step(method, torch.full_like(stream[0], torch.nan))
    method.state.generator.set_state(saved["generator"])
    answers += [step(method, images).probs for images in stream[3:]]
    method.load_state_dict(saved)
    assert all(torch.equal(step(method, images).probs, answers[3 + i]) for i, images in enumerate(stream[3:]))
    method.reset()
    assert all(torch.equal(step(method, images).probs, answers[i]) for i, images in enumerate(stream))


def test_unhealthy_batches_are_counted_after_a_while_without_a_request(caplog):
    method = fused("tent", "plain")
    for _ in range(MOST_FLAGS + 6):
        step(method, torch.full((2, 3, 8, 8), torch.nan))
    assert f"{MOST_FLAGS + 1} batch" in caplog.text
    assert len(method.accelerator.flags) == 5
    assert method.refused["losses"] == MOST_FLAGS + 6


def test_a_copy_starts_with_no_steps_of_its_own():
    method = fused("tent")
    step(method, batches(1)[0])
    assert method.accelerator.flags
    twin = copy.deepcopy(method).accelerator
    assert twin.method is not method
    assert [*twin.flags, *twin.graphs, *twin.seen] == []


def test_loading_writes_to_the_tensors_that_are_there():
    """A graph keeps using the tensors it was captured with, so a load must not replace them."""

    def moments():
        return [id(t) for state in method.optimizer.state.values() for t in state.values()]

    method = fused("tent")
    first, second = batches(2)
    step(method, first)
    before = moments()
    saved, generation = method.state_dict(), method.state.generation
    step(method, second)
    method.load_state_dict(saved)
    assert moments() == before
    assert method.state.generation == generation
    method.reset()  # to before the first step, where the optimiser had no tensors at all
    assert method.state.generation == generation + 1


def on_cuda(name: str, predictor: object = SAFER, **options: object) -> Method:
    return adapt_small(name, predictor, validate=False, **options).to("cuda")


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
@pytest.mark.parametrize("predictor", ["plain", SAFER, GATE])
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_learns_as_the_cpu_does(name, predictor, compile):
    """Noise is left out, since its generators differ from device to device."""
    calm = predictor if predictor == "plain" else {**predictor, "pipeline": {"preset": "released", "max_operators": 1}}
    here, there = adapt_small(name, calm), on_cuda(name, calm, compile=compile)
    assert there.accelerator.active
    for images in many(EAGER + 4):
        torch.testing.assert_close(there(images).probs.cpu(), here(images).probs, rtol=0, atol=2e-3)
    assert bool(there.accelerator.graphs) == compile
    if here.predictor.memory is not None:  # a graph writes into it too
        torch.testing.assert_close(there.predictor.memory.seen.cpu(), here.predictor.memory.seen, rtol=0.02, atol=0.02)


@needs_cuda
@pytest.mark.parametrize("name", REPEATING)
def test_a_graph_still_fits_after_a_load_a_reset_and_a_broken_batch(name):
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
    assert torch.equal(b.probs, kept)  # an answer that was handed out does not change any more
    assert graphed.refused["losses"] == 1 == eager.refused["losses"]
    graphed.load_state_dict(saved)
    assert not torch.isfinite(graphed(broken).probs).any()
    assert same(graphed.state_dict(), saved)
    answers = []
    for _ in range(2):
        graphed.load_state_dict(saved)
        answers.append([graphed(images).probs for images in stream[EAGER + 2 :]])
    torch.testing.assert_close(*answers, rtol=0, atol=1e-5)
    eager.reset()
    graphed.reset()
    for images in stream:
        torch.testing.assert_close(graphed(images).probs, eager(images).probs, rtol=0, atol=2e-3)


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_prefetched_views_change_nothing(compile, tmp_path):
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
@pytest.mark.parametrize(("error", "says"), [(InvalidValueError, "alpha channel"), (OSError, "camera")])
def test_a_stream_answers_the_batches_before_an_error(error, says):
    def source():
        yield from batches(2)
        if error is OSError:
            raise OSError("the camera is gone")
        yield torch.zeros(2, 4, 8, 8)

    answers = []
    with pytest.raises(error, match=says):
        answers.extend(on_cuda("tent").stream(source()))
    assert len(answers) == 2


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_does_not_wait_for_the_device(compile):
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
def test_a_guard_waits_for_every_step():
    assert not safer_tta.Guard(on_cuda("tent")).method.accelerator.active


@needs_cuda
def test_a_method_that_returns_to_the_cpu_adapts_there():
    method = on_cuda("tent")
    first, *others = batches(4)
    method(first)
    method.to("cpu")
    assert not method.accelerator.active
    assert all(torch.isfinite(method(images).probs).all() for images in others)
