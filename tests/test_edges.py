"""Edge cases of the core, each as a user would meet it."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import logging
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import safer_tta
from safer_tta import Mixing, Safer, mixing, pooling
from safer_tta.methods import METHODS
from safer_tta.methods._frame.augmentations import CHAIN, augmix, strong
from safer_tta.views import OPERATORS
from tests.conftest import LEARNING, batches, classifier, learnt, same, small_net


def test_three_lines(model, images):
    kept = copy.deepcopy(model.state_dict())
    adapted = safer_tta.adapt(model)
    prediction = adapted(images)
    assert prediction.labels.shape == (6,)
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items()), "the caller's model was changed"
    assert all(p.requires_grad for p in model.parameters())
    assert model.training


def test_copy_false_adapts_the_callers_model(model, images):
    before = model.norm1.weight.clone()
    safer_tta.adapt(model, copy=False)(images)
    assert not torch.equal(model.norm1.weight, before)


def test_one_image_gets_uniform_weights_and_one_warning(model):
    adapted = safer_tta.adapt(model, seed=0)
    with pytest.warns(UserWarning, match="one image") as caught:
        prediction, *_ = list(adapted.stream(batches(3, size=1)))
    assert len(caught) == 1
    assert torch.allclose(prediction.report.weights, torch.full((5, 1), 0.2))
    assert prediction.report.dropped == -1


def test_all_reliabilities_negative_falls_back_to_all_views():
    z = torch.randn(1, 8, 5, generator=torch.Generator().manual_seed(0))
    features = torch.cat([z, -z])  # two views that contradict each other
    assert (pooling.reliability(features) < 0).all()
    pooled = pooling.pool("cc_drop", torch.full((2, 8, 3), 1 / 3), features)
    assert torch.allclose(pooled.weights, torch.full((2, 8), 0.5))
    assert pooled.dropped == -1


def test_no_views_is_the_plain_prediction(model, images):
    model.eval()
    plain, none = safer_tta.Plain(model)(images), Safer(model, views=0)(images)
    assert torch.equal(plain.logits, none.logits)
    assert torch.equal(plain.features, none.features)


def test_no_views_with_mixing_is_still_plain(model, images):
    model.eval()
    assert torch.equal(safer_tta.Plain(model)(images).probs, Safer(model, views=0, mixing="sigmoid")(images).probs)


@pytest.mark.parametrize("seed", range(20))
def test_two_views_tie_and_the_original_is_dropped(seed):
    """Both reliabilities are the same number to the last bit, whatever the features."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(7, 33, generator=generator)
    features = torch.stack([z, z + torch.randn(7, 33, generator=generator)])
    assert pooling.reliability(features)[0] == pooling.reliability(features)[1] > 0
    pooled = pooling.pool("cc_drop", torch.full((2, 7, 3), 1 / 3), features)
    assert pooled.dropped == 0
    assert torch.equal(pooled.weights[:, 0], torch.tensor([0.0, 1.0]))


def test_with_one_view_the_answer_is_the_augmented_one(model, images):
    model.eval()
    prediction = Safer(model, views=1, seed=3)(images)
    assert prediction.report.dropped == 0
    assert torch.equal(prediction.probs, prediction.report.view_probs[1])


@pytest.mark.parametrize("rule", pooling.RULES)
def test_one_class(rule, images):
    prediction = safer_tta.adapt(small_net(classes=1), safer={"pool": rule, "mixing": "sigmoid"}, seed=0)(images)
    assert torch.allclose(prediction.probs, torch.ones(6, 1))


@pytest.mark.parametrize("side", [17, 33, 50])
def test_sides_that_32_does_not_divide(model, side):
    prediction = safer_tta.adapt(model, seed=0)(batches(1, side=side)[0])
    assert torch.isfinite(prediction.probs).all()


def test_images_that_are_not_square(model):
    images = torch.rand(4, 3, 20, 31)
    assert safer_tta.adapt(model, seed=0)(images).probs.shape == (4, 5)


def test_uint8(model, images):
    eight = (images * 255).round().byte()
    a, b = (safer_tta.adapt(model, seed=0)(x).probs for x in (eight, eight.float() / 255))
    assert torch.equal(a, b)


def test_numpy_is_refused_with_advice(model, images):
    with pytest.raises(TypeError, match="ndarray"):
        safer_tta.adapt(model)(images.numpy())


def test_validate_false_skips_the_look_at_values(model, images):
    trusted = safer_tta.adapt(model, seed=0, validate=False)
    trusted(images + 0.5)
    with pytest.raises(ValueError):
        trusted(images[:, :1])  # shapes are still checked, they cost nothing


def test_tent_needs_norms():
    with pytest.raises(ValueError, match="normalisation"):
        safer_tta.adapt(small_net(norm="none"), "tent")


def test_pl_needs_none(images):
    assert safer_tta.adapt(small_net(norm="none"), "pl")(images).probs.shape == (6, 5)


def test_tent_moves_group_norm(images):
    adapted = safer_tta.adapt(small_net(norm="group"), "tent", safer=False)
    before = adapted.state_dict()
    adapted(images)
    after = adapted.state_dict()
    moved = {name for name in before if name.startswith("model.") and not torch.equal(before[name], after[name])}
    assert moved == {f"model.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}


def test_no_confident_image_no_step(images):
    model = small_net()
    model.fc.weight.data.zero_()
    adapted = safer_tta.adapt(model, "pl", safer=False)
    parameters = {n: p.clone() for n, p in adapted.export().named_parameters()}
    adapted(images)
    assert all(torch.equal(p, parameters[n]) for n, p in adapted.export().named_parameters())
    assert not [name for name in adapted.state_dict() if name.startswith("optimizer")]


def test_a_non_finite_loss_is_answered_and_not_learnt(model, images, caplog):
    adapted = safer_tta.adapt(model, "pl", safer=False)
    list(adapted.stream(batches(1)))
    before = adapted.state_dict()
    forward = adapted.forward
    adapted.forward = lambda *a: (forward(*a)[0], torch.tensor(torch.nan))
    with caplog.at_level(logging.WARNING, logger="safer_tta"):
        adapted(images)
    assert "nan" in caplog.text
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items() if n != "generator")


def test_dropout_stays_off(model, images):
    adapted = safer_tta.adapt(model, "pl", safer=False)
    assert torch.equal(adapted.predict(images).probs, adapted.predict(images).probs)


def test_stream_takes_a_data_loader(model):
    images = torch.cat(batches(2))
    loader = DataLoader(TensorDataset(images, torch.zeros(12)), batch_size=5)
    assert [len(p.probs) for p in safer_tta.adapt(model, seed=0).stream(loader)] == [5, 5, 2]


def test_export_is_a_plain_module_that_answers_alike(images):
    wrapped = safer_tta.Classifier(small_net(), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    adapted = safer_tta.adapt(wrapped, "tent", safer=False)
    adapted(images)
    exported = adapted.export()
    assert type(exported) is type(wrapped.model)
    normalised = (images - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    assert torch.allclose(exported(normalised), adapted.predict(images).logits, atol=1e-6)
    exported(normalised).sum().backward()  # nothing of ours hangs on it: it trains like any module


def test_an_exported_model_and_its_method_go_their_own_ways(model, images):
    adapted = safer_tta.adapt(model, "tent", safer=False, seed=0)
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


def test_safer_takes_a_dict_or_a_predictor(model, images):
    by_dict = safer_tta.adapt(model, safer={"views": 2, "pool": "cc", "mixing": Mixing(curve="step")}, seed=3)
    by_predictor = safer_tta.adapt(model, safer=Safer(model, 2, "cc", "step"), seed=3)
    assert torch.equal(by_dict(images).probs, by_predictor(images).probs)
    assert by_dict(images).report.weights.shape == (3, 6)


def test_a_predictor_given_twice_is_not_shared(model, images):
    settings_of = Safer(model, seed=5)
    one, two = safer_tta.adapt(model, safer=settings_of), safer_tta.adapt(model, safer=settings_of)
    assert torch.equal(one(images).probs, two(images).probs)
    assert settings_of.validate


def test_torch_seed_decides_when_none_is_given(model, images):
    answers = []
    for _ in range(2):
        torch.manual_seed(4)
        answers.append(safer_tta.adapt(model)(images).probs)
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda m: safer_tta.adapt(m, "tnet"), ValueError, "tent"),
        (lambda m: safer_tta.adapt(m, norm="batch"), ValueError, "medbn"),
        (lambda m: safer_tta.adapt(m, safer="yes"), TypeError, "True"),
        (lambda m: safer_tta.adapt(m, lr=-1.0), ValueError, "positive"),
        (lambda m: safer_tta.adapt(m, momentum=0.9), TypeError, "lr"),
        (lambda m: safer_tta.adapt(m, "pl", threshold=2), ValueError, "probability"),
        (lambda m: safer_tta.adapt("resnet18"), TypeError, "nn.Module"),
        (lambda m: Safer(m, views=-1), ValueError, "0 or more"),
        (lambda m: Safer(m, views=True), ValueError, "0 or more"),
        (lambda m: Safer(m, pool="best"), ValueError, "cc_drop"),
        (lambda m: Safer(m, mixing="soft"), ValueError, "sigmoid"),
        (lambda m: Safer(m, mixing=True), ValueError, "sigmoid"),
        (lambda m: Safer(m, mixing=Mixing), ValueError, "sigmoid"),
        (lambda m: Safer(m, mixing={"tau": 0.3, "curve": "cubic"}), ValueError, "sigmoid"),
        (lambda m: Safer(m, pipeline=["gaussian_blur"]), TypeError, "Pipeline"),
        (lambda m: safer_tta.methods.create("tent", m), TypeError, "Plain"),
        (lambda m: safer_tta.adapt(m, safer={"seed": 1}, seed=2), ValueError, "one of them"),
        (lambda m: safer_tta.Classifier(m, mean=(0.5, 0.5), std=(0.2, 0.2)), ValueError, "3 channels"),
        (lambda m: OPERATORS["rotate"](torch.rand(2, 3, 8, 8), 10.0), ValueError, "one value per image"),
        (lambda m: pooling.reliability(torch.rand(3, 4)), ValueError, "V,B,d"),
        (lambda m: Safer(m, pipeline="mine"), ValueError, "released"),
        (lambda m: Safer(m, pipeline=safer_tta.views.Pipeline(max_operators=0)), ValueError, "1 to 16"),
        (lambda m: safer_tta.Defended(m, "png"), ValueError, "jpeg"),
        (lambda m: safer_tta.predictors.create("gate?", m), ValueError, "safer-a"),
        (lambda m: Mixing(curve="cubic"), ValueError, "sigmoid"),
        (lambda m: Mixing(signal="gut"), ValueError, "feat_disagreement"),
        (lambda m: Mixing(alpha_clean=1.2), ValueError, "between 0 and 1"),
        (lambda m: Mixing(delta=0), ValueError, "positive"),
        (lambda m: mixing.signal("gut", *[torch.rand(2, 3, 4)] * 2), ValueError, "feat_disagreement"),
        (lambda m: pooling.weights("best", *[torch.rand(2, 3, 4)] * 2), ValueError, "cc_drop"),
    ],
)
def test_mistakes_are_named(model, call, error, says):
    with pytest.raises(error, match=says):
        call(model)


def test_mixing_changes_the_answer_but_not_the_features(model, images):
    model.eval()
    plain, mixed = (Safer(model, seed=0, mixing=m)(images) for m in (None, "sigmoid"))
    assert torch.equal(plain.features, mixed.features)
    assert not torch.equal(plain.probs, mixed.probs)


def test_a_report_has_what_there_is_to_say(model, images):
    report = safer_tta.adapt(model, seed=0)(images).report
    assert report.signal.shape == (6,)
    assert report.reliability.shape == (5,)
    assert len(report.pipelines) == 4
    assert report.pipelines[0][0] == "gaussian_noise"


def test_all_views_share_one_forward_pass_and_its_statistics(model, images):
    calls = []
    adapted = safer_tta.adapt(model, "bn", seed=0)
    adapted.classifier.model.conv1.register_forward_hook(lambda m, x, y: calls.append(len(x[0])))
    adapted(images)
    assert calls == [30]


@settings(max_examples=40, deadline=None)
@given(
    views=st.integers(1, 6), size=st.integers(1, 9), classes=st.integers(1, 6), width=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 1e4]), rule=st.sampled_from(sorted(pooling.RULES)),
)  # fmt: skip
def test_weights_always_share_one(views, size, classes, width, seed, scale, rule):
    generator = torch.Generator().manual_seed(seed)
    probs = (scale * torch.randn(views, size, classes, generator=generator)).softmax(-1)
    features = scale * torch.randn(views, size, width, generator=generator)
    weights = pooling.weights(rule, probs, features)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(0), torch.ones(size), atol=1e-5)
    mixed, _ = Mixing().mix(weights, probs, features)
    assert torch.allclose(mixed.sum(0), torch.ones(size), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(OPERATORS)), size=st.integers(1, 4), height=st.integers(5, 20),
    width=st.integers(5, 20), seed=st.integers(0, 2**31), fill=st.sampled_from(["random", "black", "white"]),
)  # fmt: skip
def test_operators_stay_in_range_on_any_shape(name, size, height, width, seed, fill):
    generator = torch.Generator().manual_seed(seed)
    images = {"random": torch.rand, "black": torch.zeros, "white": torch.ones}[fill](size, 3, height, width)
    out = OPERATORS[name](images, OPERATORS[name].sample(size, generator), generator=generator)
    assert out.shape == images.shape
    assert 0 <= out.min() <= out.max() <= 1


def test_nothing_is_printed_or_warned_in_ordinary_use(model, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(safer_tta.adapt(model, seed=0).stream(batches(2)))
    assert capfd.readouterr() == ("", "")


def test_classifier_given_as_model_is_used(images):
    wrapped = classifier()
    assert safer_tta.adapt(wrapped, seed=0)(images).probs.shape == (6, 5)


def test_threads_get_their_own_answers(model):
    """Four threads, one method, batches of different sizes: every answer is the one a lone caller gets."""
    adapted = safer_tta.adapt(model, "pl", safer=False)
    sizes = [batches(1, size=n)[0] for n in (3, 4, 5, 6)]
    expected = [adapted.predict(x).probs for x in sizes]
    before = adapted.state_dict()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(adapted.predict, sizes * 25))
    assert all(torch.equal(a.probs, expected[i % 4]) for i, a in enumerate(answers))
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())


def test_nobody_else_uses_a_method_while_one_has_it_to_itself(model, images, tmp_path):
    """They wait; the one who has it does not, and what was done meanwhile is what they find."""
    adapted = safer_tta.adapt(model, "tent", safer=False, seed=0)
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
        with adapted.to_myself():
            adapted(images)
            learnt = adapted.state_dict()
            waiting = [pool.submit(use) for use in uses]
            assert not concurrent.futures.wait(waiting, timeout=0.3, return_when="FIRST_COMPLETED").done
            assert same(adapted.state_dict(), learnt)
        assert not concurrent.futures.wait(waiting, timeout=60).not_done
        for use in waiting:
            use.result()


def test_predictors_may_be_shared_by_threads(model):
    predictor = safer_tta.Plain(model.eval())
    sizes = [batches(1, size=n)[0] for n in (3, 4, 5, 6)]
    expected = [predictor(x).probs for x in sizes]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(predictor, sizes * 25))
    assert all(torch.equal(a.probs, expected[i % 4]) for i, a in enumerate(answers))


def test_learning_does_not_reach_into_the_callers_graph(model, images):
    scale = torch.ones(1, requires_grad=True)
    safer_tta.adapt(model, seed=0)(images * scale)
    assert scale.grad is None


@pytest.mark.parametrize("method", ["bn", "pl"])
def test_nan_in_a_trusted_stream_does_not_stay(model, images, method):
    adapted = safer_tta.adapt(model, method, safer=False, validate=False)
    poisoned = images.clone()
    poisoned[0, 0, 0, 0] = torch.nan
    adapted(poisoned)
    adapted(images)
    assert all(torch.isfinite(t).all() for t in adapted.export().state_dict().values())


def test_half_precision_models_are_answered_but_do_not_learn(images):
    assert torch.isfinite(safer_tta.adapt(small_net().half(), "none", seed=0)(images).probs).all()
    with pytest.raises(ValueError, match="float16"):
        safer_tta.adapt(small_net().half(), "tent")


def test_bfloat16_models_are_answered_but_cannot_learn(images):
    """A step of 1e-3 on a weight near one rounds to nothing in bfloat16."""
    with pytest.raises(ValueError, match="bfloat16"):
        safer_tta.adapt(small_net().bfloat16(), "tent")
    answered = safer_tta.adapt(small_net().bfloat16(), "t3a", seed=0)
    assert torch.isfinite(list(answered.stream([images] * 3))[-1].probs).all()


def test_loaded_and_exported_under_inference_mode_can_train(model, images):
    adapted = safer_tta.adapt(model, seed=0)
    adapted(images)
    with torch.inference_mode():
        adapted.load_state_dict(adapted.state_dict())
        exported = adapted.export()
    adapted(images)
    exported(images).sum().backward()


def test_equalize_under_another_default_dtype(images):
    torch.set_default_dtype(torch.float64)
    try:
        assert OPERATORS["equalize"](images).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_medbn_needs_batch_norm():
    with pytest.raises(ValueError, match="no batch-norm"):
        safer_tta.adapt(small_net(norm="group"), norm="medbn")


def test_a_predictors_normalisation_comes_along(model, images):
    settings_of = safer_tta.Plain(safer_tta.Classifier(model.eval(), mean=0.4, std=0.3))
    adapted = safer_tta.adapt(model, "none", settings_of)
    assert torch.equal(adapted(images).probs, settings_of(images, track=False).probs)


def test_dropped_is_only_said_of_rules_that_drop_for_the_whole_batch():
    probs = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.9, 0.1], [0.5, 0.5]]])
    assert pooling.pool("entropy", probs, torch.rand(2, 2, 3)).dropped == -1


def test_one_image_with_confidence_weights_warns_of_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safer_tta.adapt(model, safer={"pool": "top1"}, seed=0)(batches(1, size=1)[0])


def test_one_image_that_leaves_one_value_per_channel():
    resnet = safer_tta.models.zoo.create("resnet18", num_classes=3)
    with pytest.raises(ValueError, match="at least two images"):
        safer_tta.adapt(resnet, safer=False)(torch.rand(1, 3, 32, 32))


def test_head_that_cannot_be_found():
    with pytest.raises(ValueError, match="no head found"):
        safer_tta.adapt(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("t3a", {"keep": 0}), ("tsd", {"keep": 0}), ("tesla", {"neighbours": 0}), ("memo", {"lr": float("nan")})),
        *(("memo", {"lr": -1.0}), ("sar", {"lr": 0.0}), ("sar", {"lr": None}), ("cotta", {"keep": 3.0})),
        *(("cotta", {"versions": 0}), ("eata", {"momentum": 7.0}), ("rotta", {"capacity": 0})),
        *(("sotta", {"capacity": 0}), ("note", {"every": 0}), ("tent", {"lr": float("inf")})),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(method, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*expected"):
        safer_tta.adapt(small_net(), method, "plain", **options)


def test_one_image_that_cannot_be_answered_does_not_spoil_t3a_for_the_others(images):
    adapted = safer_tta.adapt(small_net(), "t3a", "plain", seed=0, validate=False)
    spoilt = images.clone()
    spoilt[0] = torch.nan
    answer = adapted(spoilt).probs
    assert torch.isnan(answer[0]).all()
    assert torch.isfinite(answer[1:]).all()


@pytest.mark.parametrize("method", ["tesla", "cotta", "rotta"])
def test_a_teachers_normalisation_follows_to_another_device(method):
    adapted = safer_tta.adapt(safer_tta.Classifier(small_net(), mean=0.5, std=0.5), method, safer=False, seed=0)
    adapted.state.to(torch.device("meta"))
    assert adapted.teacher.classifier.mean.device.type == "meta"


@pytest.mark.parametrize("operation", CHAIN[4:])
def test_augmix_at_severity_one_barely_moves_anything(operation):
    """At most 3 whole degrees, 3 % of shear, a thirtieth of the side: a dot near the rim moves by a pixel or two."""
    dot = torch.zeros(2, 3, 33, 33)
    dot[:, :, 3:6, 15:18] = 1.0
    moved = operation(dot, torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]))
    rows, columns = torch.meshgrid(torch.arange(33.0), torch.arange(33.0), indexing="ij")
    for image in moved[:, 0]:
        where = [float((image * axis).sum() / image.sum()) for axis in (rows, columns)]
        assert abs(where[0] - 4) <= 2
        assert abs(where[1] - 16) <= 2


def test_augmix_makes_every_copy_differently():
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))
    versions = augmix(image, 16, torch.Generator().manual_seed(0))
    assert ((versions >= 0) & (versions <= 1)).all()
    assert len({version.sum().item() for version in versions}) == 16


def test_strong_views_shift_by_an_eighth_of_the_side():
    """A dot in the middle stays within an eighth of the side, a tenth of zoom and 15 degrees: 32 px, 4 px, a little."""
    dot = torch.zeros(200, 3, 33, 33)
    dot[:, :, 15:18, 15:18] = 1.0
    seen = strong(dot, torch.Generator().manual_seed(0)).mean(dim=1).flatten(1).argmax(dim=1)
    away = torch.maximum((seen // 33 - 16).abs(), (seen % 33 - 16).abs())
    assert 3 <= int(away.max()) <= 6


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"bn"}))
def test_views_in_chunks_are_the_views_at_once_where_no_batch_statistics_are(method):
    """Answers and what is learnt from them; with batch norm each chunk would have statistics of its own, as the mean
    inputs have by which TeSLA's policy is judged."""
    net, stream = small_net(norm="group").double(), [x.double() for x in batches(3)]
    whole, chunked = (
        safer_tta.adapt(net, method, {"chunk": chunk}, seed=0, **LEARNING.get(method, {})) for chunk in (None, 7)
    )
    for a, b in zip(learnt(whole, stream), learnt(chunked, stream), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)
    other = chunked.state_dict()
    for name, tensor in whole.state_dict().items():
        if "policy" not in name:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "passes"), [("pl", 1), ("shot_im", 1), ("tsd", 1), ("sotta", 1), ("tesla", 2), ("bn", 1)]
)
def test_recomputed_chunks_move_running_statistics_once(method, passes):
    """What is computed again must save what the first pass saved, and leaves the statistics to the first pass. SoTTA's
    second pass, at the worst point nearby, leaves them too; TeSLA's student sees a second view."""
    adapted = safer_tta.adapt(small_net(), method, {"chunk": 10}, seed=0, **LEARNING.get(method, {}))
    learnt(adapted, batches(1))
    assert int(adapted.classifier.model.norm1.num_batches_tracked) == 3 * passes  # 30 images in chunks of 10


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "cotta", "note", "rotta", "rdumb"])
def test_other_methods_learn_in_chunks_too(method):
    adapted = safer_tta.adapt(small_net(), method, {"chunk": 10}, seed=0, **LEARNING.get(method, {}))
    assert all(torch.isfinite(answer).all() for answer in learnt(adapted, batches(2)))


def test_views_written_in_place_are_those_with_a_graph(images):
    draw = safer_tta.Safer(small_net(), seed=0).draw(images)
    tracked = images.clone().requires_grad_(True)
    assert torch.equal(draw.views(images), draw.views(tracked).detach())


@pytest.mark.parametrize("chunk", [0, -1, True, 1.5])
def test_a_chunk_that_is_none_is_refused(chunk):
    with pytest.raises(ValueError, match="chunk"):
        safer_tta.Safer(small_net(), chunk=chunk)


@pytest.mark.parametrize("method", ["tent", "pl", "t3a", "cotta"])
def test_half_precision_passes_learn_in_single_precision(method, images):
    whole, half = (safer_tta.adapt(small_net(), method, seed=0, precision=p) for p in ("float32", "bfloat16"))
    for x in batches(3):
        a, b = whole(x), half(x)
        assert b.probs.dtype == b.features.dtype == torch.float32
        torch.testing.assert_close(b.probs, a.probs, rtol=0.1, atol=0.1)
    assert all(t.dtype == torch.float32 for t in half.state_dict().values() if t.is_floating_point())
    assert half.export()(images).dtype == torch.float32
    with pytest.raises(ValueError, match="expected one of float32, bfloat16"):
        safer_tta.adapt(small_net(), method, precision="float8")


@pytest.mark.parametrize("inference", [False, True])
def test_views_made_side_by_side_are_the_same_views(inference):
    """On threads or one after the other; and the caller's number of threads stays."""
    before = torch.get_num_threads()
    images = torch.rand(12, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    draw = safer_tta.views.Pipeline().draw(4, 12, torch.Generator().manual_seed(1))
    try:
        with torch.inference_mode(inference):
            torch.set_num_threads(2)
            together = draw.views(images)
            assert torch.get_num_threads() == 2
            torch.set_num_threads(1)
            alone = draw.views(images)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    finally:
        torch.set_num_threads(before)


# --- what new users ran into ------------------------------------------------------------------------------------------


def test_a_domain_is_not_a_list_of_domains_and_floats_are_not_bytes():
    domain = safer_tta.data.open_dataset("synthetic", count=14).domain("sketch")
    with pytest.raises(ValueError, match=r"expected a list of them, such as \[domain\]"):
        safer_tta.data.Stream(domain, safer_tta.data.StreamSpec())
    floats = domain.images.astype("float32") / 255
    with pytest.raises(ValueError, match=r"float32 .*expected uint8"):
        safer_tta.data.Stream([domain], safer_tta.data.StreamSpec(attack_rate=50), [floats])


def test_a_guard_streams_as_its_method_does(model, images):
    guarded = safer_tta.Guard(safer_tta.adapt(model, seed=0))
    method = safer_tta.adapt(model, seed=0)
    for ours, theirs in zip(
        guarded.stream([images, images], prefetch=False), method.stream([images, images], prefetch=False), strict=True
    ):
        assert torch.equal(ours.probs, theirs.probs)


def test_a_model_by_the_path_of_its_file():
    from safer_tta.training.backbone import SHIPPED

    assert (
        safer_tta.models.zoo.create(SHIPPED).state_dict().keys()
        == safer_tta.models.zoo.create("small").state_dict().keys()
    )


def test_a_cell_that_defines_a_method_may_run_twice_and_nobody_else():
    from safer_tta.methods._frame.registry import METHODS, describe, register

    def cell(module: str) -> None:
        made = type("Mine", (METHODS["none"],), {"__module__": module})
        register("mine")(made)

    try:
        cell("__main__")
        cell("__main__")
        assert describe("mine")["updates"] == "none"
        with pytest.raises(ValueError, match="another method is called 'mine' already"):
            cell("elsewhere")
    finally:
        METHODS.pop("mine", None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"safer": {"pol": "mean"}}, "safer has no option pol; expected some of views, pool"),
        ({"safer": {"pipeline": {"opertors": 2}}}, "the pipeline has no option opertors; expected some of"),
        ({"safer": {"mixing": {"name": "gate", "taus": 1}}}, "mixing 'gate' has no option taus; expected some of"),
        ({"method": "tent", "rate": 1}, "tent has no option rate; expected some of lr"),
        ({"method": "none", "lr": 1}, "none has no option lr; it has none"),
    ],
)
def test_an_option_that_does_not_exist_is_met_with_those_that_do(model, options, says):
    with pytest.raises(TypeError, match=says):
        safer_tta.adapt(model, **options)
    with pytest.raises(TypeError, match="jpeg has no option quality"):
        safer_tta.predictors.create("jpeg", model, quality=3)


@pytest.mark.parametrize("name", ["note", "sotta", "rotta"])
def test_a_memory_of_images_wants_one_size(model, name):
    adapted = safer_tta.adapt(model, name, safer=False, seed=0, **({"threshold": 0.0} if name == "sotta" else {}))
    adapted(batches(1)[0])
    before = adapted.state_dict()
    with pytest.raises(ValueError, match=r"images are \(3, 32, 32\) and the memory holds \(3, 24, 24\)"):
        adapted(batches(1, side=32)[0])
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eata", {"redundancy": -1}),
        ("eata", {"fisher": -5}),
        ("cotta", {"threshold": float("nan")}),
        ("sar", {"recovery": float("nan")}),
        ("rdumb", {"every": 2.5}),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(model, method, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; expected"):
        safer_tta.adapt(model, method, **options)


def test_two_transforms_cannot_have_one_name():
    from safer_tta.predictors.defended import transform

    with pytest.raises(ValueError, match="'jpeg' already"):
        transform("jpeg")(lambda images: images)


def test_the_gate_alone_refuses_too_few_views():
    views = torch.rand(3, 4, 5)
    with pytest.raises(ValueError, match="2 augmented views, too few"):
        mixing.create("gate").mix(torch.full((3, 4), 1 / 3), views.softmax(-1), views)


def test_batch_statistics_of_a_model_without_batch_norm_are_refused():
    with pytest.raises(ValueError, match="no batch-norm layer"):
        safer_tta.adapt(small_net(norm="group"), "bn")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((2, 8, 8, 3), r"images.permute\(0, 3, 1, 2\)"),
        ((3, 8, 8), r"images.unsqueeze\(0\)"),
        ((2, 1, 8, 8), "images.expand"),
        ((2, 4, 8, 8), "alpha channel"),
    ],
)
def test_images_of_another_shape_are_met_with_what_to_do(model, shape, says):
    with pytest.raises(ValueError, match=says):
        safer_tta.adapt(model, seed=0)(torch.zeros(shape))


def test_images_that_are_a_rounding_error_too_bright_are_told_to_be_clamped(model, images):
    images = images.clone()
    images[0, 0, 0, 0] = 1 + 2e-7
    with pytest.raises(ValueError, match=r"1\.0000002\].*images\.clamp\(0, 1\)"):
        safer_tta.adapt(model, seed=0)(images)


@pytest.mark.parametrize("mean_and_std", [((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)), (127.5, 127.5)])
def test_statistics_of_bytes_are_refused(model, mean_and_std):
    mean, std = mean_and_std
    with pytest.raises(ValueError, match="divide both by 255"):
        safer_tta.Classifier(model, mean=mean, std=std)


def test_a_model_that_returns_no_scores_is_told_so(model, images):
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            return (self.inner(x), None)

    with pytest.raises(TypeError, match=r"returned tuple; expected a tensor of class scores \(B,K\)"):
        safer_tta.adapt(Wrapped(), seed=0)(images)


def test_a_method_that_updates_what_there_is_not_is_refused():
    from safer_tta.methods._frame.registry import METHODS, register

    with pytest.raises(ValueError, match="updates is 'norms'; expected one of none, norm, features, all"):
        register("typo")(type("Typo", (METHODS["none"],), {"updates": "norms"}))
    assert "typo" not in METHODS


def test_of_several_methods_in_a_file_each_says_what_it_is():
    from safer_tta.methods._frame.registry import METHODS, describe, register

    text = 'Mine: learns from everything.\n\nSomebody et al., "Everything", CONF 2026.\n'
    register("cited")(type("Cited", (METHODS["none"],), {"__doc__": text, "__module__": __name__}))
    try:
        assert describe("cited")["what"] == "Mine: learns from everything."
        assert describe("cited")["paper"] == 'Somebody et al., "Everything", CONF 2026'
    finally:
        del METHODS["cited"]


def test_a_method_that_takes_any_option_takes_any_option(model, images):
    from safer_tta.methods._frame.registry import METHODS, register, settings

    class Any_(METHODS["tent"]):  # noqa: N801 - a name for the registry alone
        def __init__(self, predictor, **options):
            super().__init__(predictor, **options)

    register("anything")(Any_)
    try:
        assert settings("anything", {"lr": 0.5}) == {"lr": 0.5}
        assert torch.isfinite(safer_tta.adapt(model, "anything", seed=0, lr=1e-4)(images).probs).all()
    finally:
        del METHODS["anything"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "tent+medbn"}, r"adapt\(model, 'tent', norm='medbn'\)"),
        ({"safer": {"pipeline": {"max_operators": 2.5}}}, "max_operators is 2.5"),
    ],
)
def test_what_is_meant_is_said(model, options, says):
    with pytest.raises(ValueError, match=says):
        safer_tta.adapt(model, **options)
