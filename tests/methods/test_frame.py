"""Test what the frame guarantees: unhealthy batches, memories, copies, threads, precision and caller's modes."""

import concurrent.futures
import copy
import functools
import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import safer_tta
from safer_tta import Classifier
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.methods import METHODS
from tests.conftest import LEARNING, adapt_small, batches, identical, same, small_net


def test_methods_that_update_norms_need_some(images):
    with pytest.raises(InvalidValueError, match="normalisation"):
        safer_tta.adapt(small_net(norm="none"), "tent")
    assert safer_tta.adapt(small_net(norm="none"), "pl")(images).probs.shape == (6, 5)


def test_updating_norms_moves_nothing_else(images):
    adapted = safer_tta.adapt(small_net(norm="group"), "tent", "plain")
    before = adapted.state_dict()
    adapted(images)
    after = adapted.state_dict()
    moved = {name for name in before if name.startswith("model.") and not torch.equal(before[name], after[name])}
    assert moved == {f"model.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}


def test_a_batch_without_a_lesson_moves_nothing(images):
    model = small_net()
    model.fc.weight.data.zero_()  # so that PL is certain of no image
    adapted = safer_tta.adapt(model, "pl", "plain")
    before = dict(adapted.export().named_parameters())
    adapted(images)
    assert identical(dict(adapted.export().named_parameters()), before)
    assert not [name for name in adapted.state_dict() if name.startswith("optimizer")]


def test_a_batch_with_a_loss_that_is_not_finite_is_answered_and_not_learnt(images, monkeypatch, caplog):
    adapted = adapt_small("pl")
    list(adapted.stream(batches(1)))
    before = adapted.state_dict()
    forward = adapted.forward
    monkeypatch.setattr(adapted, "forward", lambda *given: forward(*given)._replace(loss=torch.tensor(torch.nan)))
    with caplog.at_level(logging.WARNING, logger="safer_tta"):
        assert torch.isfinite(adapted(images).probs).all()
    assert "nan" in caplog.text
    assert adapted.refused == {"losses": 1}
    assert same(adapted.state_dict(), before)


@pytest.mark.parametrize("method", ["bn", "pl"])
def test_nan_in_a_trusted_stream_does_not_stay(images, method):
    adapted = adapt_small(method, validate=False)
    poisoned = images.clone()
    poisoned[0, 0, 0, 0] = torch.nan
    adapted(poisoned)
    adapted(images)
    assert all(torch.isfinite(t).all() for t in adapted.export().state_dict().values())


def test_t3a_keeps_an_image_without_an_answer_from_spoiling_the_others(images):
    images[0] = torch.nan
    answer = adapt_small("t3a", validate=False)(images).probs
    assert torch.isnan(answer[0]).all()
    assert torch.isfinite(answer[1:]).all()


def test_a_stream_may_come_from_a_data_loader(model):
    loader = DataLoader(TensorDataset(torch.cat(batches(2)), torch.zeros(12)), batch_size=5)
    assert [len(p.probs) for p in safer_tta.adapt(model, seed=0).stream(loader)] == [5, 5, 2]


@pytest.mark.parametrize("method", ["tesla", "cotta", "rotta"])
def test_a_teachers_normalisation_follows_to_another_device(method):
    adapted = safer_tta.adapt(Classifier(small_net(), mean=0.5, std=0.5), method, "plain", seed=0)
    adapted.state.to(torch.device("meta"))
    assert adapted.teacher.classifier.mean.device.type == "meta"


@pytest.fixture(params=["note", "rotta", "sotta"])
def remembering(request) -> safer_tta.Method:
    unsure = {"threshold": 0.0} if request.param == "sotta" else {}  # it remembers only what it is sure of
    return adapt_small(request.param, **unsure)


def test_images_outlive_the_buffer_that_they_arrived_in(remembering):
    """A camera's loop sends one image at a time, always in the same buffer."""
    stream = batches(4, size=1)
    buffer = stream[0].clone()
    for following in stream[1:]:
        remembering(buffer)
        held = remembering.state.memory["memory_image"]
        if len(held):
            assert torch.equal(held[0], stream[0][0].to(held.dtype)), "the first image is still the first image"
        buffer.copy_(following)
    assert len(remembering.state.memory["memory_image"]) > 1


def test_images_of_another_size_are_refused_and_change_nothing(remembering):
    remembering(batches(1)[0])
    before = remembering.state_dict()
    with pytest.raises(InvalidValueError, match=r"images are \(3, 32, 32\) and the memory holds \(3, 24, 24\)"):
        remembering(batches(1, side=32)[0])
    assert identical(remembering.state_dict(), before)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_answer_shares_no_tensor_with_the_method(method):
    adapted = adapt_small(method, "safer-g", **LEARNING.get(method, {}))
    for images in batches(2):
        prediction = adapted(images)
    report = vars(prediction.report)
    handed = [prediction.probs, prediction.logits, prediction.features, *report.values(), *report["signals"].values()]
    model = adapted.classifier
    kept = [*adapted.state.memory.values(), adapted.predictor.memory.seen, *model.parameters(), *model.buffers()]
    places = {t.untyped_storage().data_ptr() for t in kept if t.numel()}
    assert not places & {t.untyped_storage().data_ptr() for t in handed if isinstance(t, torch.Tensor)}


def test_an_exported_model_is_a_plain_module_that_answers_alike(images):
    """A method that answers with the running statistics, which it moves."""
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    wrapped = Classifier(small_net(), mean=mean, std=std)
    adapted = safer_tta.adapt(wrapped, "sotta", "plain", every=3, threshold=0.0)
    adapted(images)
    exported = adapted.export()
    assert type(exported) is type(wrapped.model)
    normalised = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(exported(normalised), adapted.predict(images).logits, atol=1e-6)
    exported(normalised).sum().backward()  # it trains as any module does


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "cotta"])
def test_dropped_statistics_come_back_in_an_exported_model(method, images):
    source = small_net()
    adapted = safer_tta.adapt(source, method, "plain", mean=0, std=1, seed=0)
    adapted(images)
    with pytest.warns(UserWarning, match=f"exported model of {method} .*statistics of each batch"):
        exported = adapted.export()
    for name in ("norm1", "norm2"):
        before, after = source.get_submodule(name), exported.get_submodule(name)
        assert torch.equal(before.running_mean, after.running_mean)
        assert torch.equal(before.running_var, after.running_var)
    together = exported(images)
    torch.testing.assert_close(torch.cat([exported(image[None]) for image in images]), together)
    fresh = small_net()
    fresh.load_state_dict(exported.state_dict())
    torch.testing.assert_close(fresh.eval()(images), together)
    assert adapted.classifier.model.norm1.running_mean is None  # the method still uses statistics of the batch


def test_an_exported_model_warns_where_medians_remain(images):
    adapted = safer_tta.adapt(small_net(), "tent", "plain", norm="medbn", mean=0, std=1)
    adapted(images)
    with pytest.warns(UserWarning, match="medians of each batch"):
        adapted.export()


def test_the_export_of_note_does_not_pass_for_an_ordinary_network(images):
    adapted = safer_tta.adapt(small_net(), "note", "plain", mean=0, std=1)
    adapted(images)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        small_net().load_state_dict(adapted.export().state_dict())


@pytest.mark.parametrize("method", ["note", "rotta"])
def test_own_norms_work_in_half_precision_passes(method, images):
    adapted = safer_tta.adapt(small_net(), method, "plain", mean=0, std=1, precision="bfloat16", every=4, capacity=8)
    for _ in range(3):
        assert torch.isfinite(adapted(images).probs).all()
    norm = adapted.classifier.model.norm1
    assert norm.running_mean.dtype == torch.float32
    assert not torch.equal(norm.running_mean, small_net().norm1.running_mean)


def test_an_exported_model_and_its_method_are_independent(images):
    adapted = adapt_small()
    adapted(images)
    exported = adapted.export()
    kept = copy.deepcopy(exported.state_dict())
    adapted(images)
    assert identical(exported.state_dict(), kept)
    before = adapted.state_dict()
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.zero_()
    assert same(adapted.state_dict(), before)


@pytest.mark.parametrize(("method", "shared"), [("pl", "predict"), ("none", "predictor")])
def test_every_thread_gets_its_own_answers(method, shared):
    adapted = adapt_small(method)
    ask = getattr(adapted, shared)
    before = adapted.state_dict()
    sizes = [batches(1, size=n)[0] for n in (3, 4, 5, 6)]
    expected = [ask(x).probs for x in sizes]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, sizes * 25))
    assert all(torch.equal(a.probs, expected[i % 4]) for i, a in enumerate(answers))
    assert identical(adapted.state_dict(), before, but="generator" if shared == "predictor" else "")  # that one draws


def test_other_threads_wait_while_one_has_the_method_to_itself(images, tmp_path):
    adapted = adapt_small()
    uses = [
        adapted.state_dict,
        adapted.export,
        functools.partial(adapted, images),
        functools.partial(adapted.predict, images),
        functools.partial(adapted.save, tmp_path / "s"),
        adapted.reset,
        adapted.restore,
    ]
    with concurrent.futures.ThreadPoolExecutor(len(uses)) as pool:
        with adapted.exclusively():
            adapted(images)
            learnt = adapted.state_dict()
            waiting = [pool.submit(use) for use in uses]
            assert not concurrent.futures.wait(waiting, timeout=0.3, return_when="FIRST_COMPLETED").done
            assert same(adapted.state_dict(), learnt)
        assert not concurrent.futures.wait(waiting, timeout=60).not_done
        for use in waiting:
            use.result()


@pytest.mark.parametrize(("dtype", "still"), [(torch.float16, "none"), (torch.bfloat16, "t3a")])
def test_models_in_half_precision_answer_but_cannot_learn(images, dtype, still):
    """A step of 1e-3 on a weight near one rounds to nothing in half precision."""
    with pytest.raises(InvalidValueError, match=str(dtype)):
        safer_tta.adapt(small_net().to(dtype), "tent")
    answering = safer_tta.adapt(small_net().to(dtype), still, seed=0)
    assert torch.isfinite(list(answering.stream([images] * 3))[-1].probs).all()


@pytest.mark.parametrize("method", ["tent", "pl", "t3a", "cotta"])
def test_passes_in_half_precision_learn_in_single_precision(method, images):
    options = {"predictor": "safer-g", **(LEARNING["cotta"] if method == "cotta" else {})}
    whole, half = (adapt_small(method, precision=given, **options) for given in ("float32", "bfloat16"))
    for x in batches(3):
        a, b = whole(x), half(x)
        assert b.probs.dtype == b.features.dtype == torch.float32
        torch.testing.assert_close(b.probs, a.probs, rtol=0.1, atol=0.1)
    kept = {n: t for n, t in half.state_dict().items() if not n.endswith("votes")}  # these are small in any case
    assert all(t.dtype == torch.float32 for t in kept.values() if t.is_floating_point())
    assert half.export()(images).dtype == torch.float32


def test_what_is_loaded_and_exported_under_inference_mode_can_train(model, images):
    adapted = safer_tta.adapt(model, seed=0)
    adapted(images)
    with torch.inference_mode():
        adapted.load_state_dict(adapted.state_dict())
        exported = adapted.export()
    adapted(images)
    exported(images).sum().backward()


OUT_OF_RANGE = {
    "cotta": [("keep", 3.0), ("threshold", torch.nan), ("versions", 0)],
    "eata": [("fisher", -5), ("momentum", 7.0), ("redundancy", -1)],
    "memo": [("lr", torch.nan), ("lr", -1.0)],
    "note": [("every", 0)],
    "pl": [("threshold", 2)],
    "rotta": [("capacity", 0)],
    "sar": [("lr", 0.0), ("recovery", torch.nan)],
    "sotta": [("capacity", 0)],
    "t3a": [("keep", 0)],
    "tent": [("lr", torch.inf)],
    "tesla": [("neighbours", 0)],
    "tsd": [("keep", 0)],
}
REFUSED = [(InvalidValueError, method, *option) for method, options in OUT_OF_RANGE.items() for option in options]
REFUSED += [(InvalidTypeError, "rdumb", "every", 2.5), (InvalidTypeError, "sar", "lr", None)]


@pytest.mark.parametrize(("error", "method", "option", "value"), REFUSED)
def test_options_that_cannot_work_are_refused_by_name(error, method, option, value):
    with pytest.raises(error, match=f"{option} is .*; expected"):
        adapt_small(method, **{option: value})
