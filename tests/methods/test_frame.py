"""Test what the frame guarantees for every method: unhealthy batches, copies, threads, precision and caller's modes."""

from __future__ import annotations

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
from tests.conftest import LEARNING, batches, same, small_net


def plain(method: str, **options: object) -> safer_tta.Method:
    return safer_tta.adapt(small_net(), method, "plain", seed=0, **options)


# --- what learns ------------------------------------------------------------------------------------------------------


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
    parameters = {n: p.clone() for n, p in adapted.export().named_parameters()}
    adapted(images)
    assert all(torch.equal(p, parameters[n]) for n, p in adapted.export().named_parameters())
    assert not [name for name in adapted.state_dict() if name.startswith("optimizer")]


def test_a_batch_with_a_loss_that_is_not_finite_is_answered_and_not_learnt(images, monkeypatch, caplog):
    adapted = plain("pl")
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
    adapted = plain(method, validate=False)
    poisoned = images.clone()
    poisoned[0, 0, 0, 0] = torch.nan
    adapted(poisoned)
    adapted(images)
    assert all(torch.isfinite(t).all() for t in adapted.export().state_dict().values())


def test_dropout_stays_off(images):
    adapted = plain("pl")
    assert torch.equal(adapted.predict(images).probs, adapted.predict(images).probs)


def test_a_stream_may_come_from_a_data_loader(model):
    loader = DataLoader(TensorDataset(torch.cat(batches(2)), torch.zeros(12)), batch_size=5)
    assert [len(p.probs) for p in safer_tta.adapt(model, seed=0).stream(loader)] == [5, 5, 2]


# --- what it hands out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_answer_shares_no_tensor_with_the_method(method):
    adapted = safer_tta.adapt(small_net(), method, seed=0, **LEARNING.get(method, {}))
    for images in batches(2):
        prediction = adapted(images)
    report = vars(prediction.report)
    handed = [prediction.probs, prediction.logits, prediction.features, *report.values(), *report["signals"].values()]
    kept = [*adapted.state.memory.values(), adapted.predictor.memory.seen, *adapted.classifier.parameters()]
    kept += [*adapted.classifier.buffers()]
    places = {t.untyped_storage().data_ptr() for t in kept if t.numel()}
    assert not places & {t.untyped_storage().data_ptr() for t in handed if isinstance(t, torch.Tensor)}


def test_an_exported_model_is_a_plain_module_that_answers_alike(images):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    wrapped = Classifier(small_net(), mean=mean, std=std)
    adapted = safer_tta.adapt(wrapped, "tent", "plain")
    adapted(images)
    exported = adapted.export()
    assert type(exported) is type(wrapped.model)
    normalised = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(exported(normalised), adapted.predict(images).logits, atol=1e-6)
    exported(normalised).sum().backward()  # it trains as any module does


def test_an_exported_model_and_its_method_are_independent(images):
    adapted = plain("tent")
    adapted(images)
    exported = adapted.export()
    kept = copy.deepcopy(exported.state_dict())
    adapted(images)
    assert all(torch.equal(t, kept[n]) for n, t in exported.state_dict().items())
    before = adapted.state_dict()
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.zero_()
    assert same(adapted.state_dict(), before)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_every_thread_gets_its_own_answers():
    """Four threads share a method and send batches of different sizes; each gets what a single caller would get."""
    adapted = plain("pl")
    sizes = [batches(1, size=n)[0] for n in (3, 4, 5, 6)]
    expected = [adapted.predict(x).probs for x in sizes]
    before = adapted.state_dict()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(adapted.predict, sizes * 25))
    assert all(torch.equal(a.probs, expected[i % 4]) for i, a in enumerate(answers))
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())


def test_other_threads_wait_while_one_has_the_method_to_itself(images, tmp_path):
    adapted = plain("tent")
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


# --- precision and modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "still"), [(torch.float16, "none"), (torch.bfloat16, "t3a")])
def test_models_in_half_precision_answer_but_cannot_learn(images, dtype, still):
    """A step of 1e-3 on a weight near one rounds to nothing in half precision."""
    with pytest.raises(InvalidValueError, match=str(dtype)):
        safer_tta.adapt(small_net().to(dtype), "tent")
    answering = safer_tta.adapt(small_net().to(dtype), still, seed=0)
    assert torch.isfinite(list(answering.stream([images] * 3))[-1].probs).all()


@pytest.mark.parametrize("method", ["tent", "pl", "t3a", "cotta"])
def test_passes_in_half_precision_learn_in_single_precision(method, images):
    options = LEARNING["cotta"] if method == "cotta" else {}
    whole, half = (
        safer_tta.adapt(small_net(), method, seed=0, precision=p, **options) for p in ("float32", "bfloat16")
    )
    for x in batches(3):
        a, b = whole(x), half(x)
        assert b.probs.dtype == b.features.dtype == torch.float32
        torch.testing.assert_close(b.probs, a.probs, rtol=0.1, atol=0.1)
    assert all(t.dtype == torch.float32 for t in half.state_dict().values() if t.is_floating_point())
    assert half.export()(images).dtype == torch.float32


def test_what_is_loaded_and_exported_under_inference_mode_can_train(model, images):
    adapted = safer_tta.adapt(model, seed=0)
    adapted(images)
    with torch.inference_mode():
        adapted.load_state_dict(adapted.state_dict())
        exported = adapted.export()
    adapted(images)
    exported(images).sum().backward()


# --- options ----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("method", "option", "value", "error"),
    [
        ("cotta", "keep", 3.0, InvalidValueError),
        ("cotta", "threshold", NAN, InvalidValueError),
        ("cotta", "versions", 0, InvalidValueError),
        ("eata", "fisher", -5, InvalidValueError),
        ("eata", "momentum", 7.0, InvalidValueError),
        ("eata", "redundancy", -1, InvalidValueError),
        ("memo", "lr", NAN, InvalidValueError),
        ("memo", "lr", -1.0, InvalidValueError),
        ("note", "every", 0, InvalidValueError),
        ("pl", "threshold", 2, InvalidValueError),
        ("rdumb", "every", 2.5, InvalidTypeError),
        ("rotta", "capacity", 0, InvalidValueError),
        ("sar", "lr", 0.0, InvalidValueError),
        ("sar", "lr", None, InvalidTypeError),
        ("sar", "recovery", NAN, InvalidValueError),
        ("sotta", "capacity", 0, InvalidValueError),
        ("t3a", "keep", 0, InvalidValueError),
        ("tent", "lr", INF, InvalidValueError),
        ("tesla", "neighbours", 0, InvalidValueError),
        ("tsd", "keep", 0, InvalidValueError),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(method, option, value, error):
    with pytest.raises(error, match=f"{option} is .*; expected"):
        plain(method, **{option: value})
