"""One contract for every registered operator, rule, mixing, attack, predictor and method.

A newly registered one is covered by being registered. What is named here is left out where it cannot apply, is the
SPEC's own list, or needs options to learn from batches as few and as small as these.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import safer_tta
from safer_tta import methods, mixing, pooling, predictors
from safer_tta.attacks import ATTACKS
from safer_tta.bench.run import check_attackable
from safer_tta.views import OPERATORS, PRESETS, Pipeline
from tests.conftest import CLASSES, LEARNING, SMOOTHING, batches, classifier, learnt

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These networks are too small for two, and waiting for each other costs more than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BAD_BATCHES = {
    "grey": torch.rand(2, 1, 24, 24),
    "four channels": torch.rand(2, 4, 24, 24),
    "one image without batch": torch.rand(3, 24, 24),
    "empty": torch.rand(0, 3, 24, 24),
    "int64": torch.zeros(2, 3, 24, 24, dtype=torch.int64),
    "nan": torch.full((2, 3, 24, 24), torch.nan),
    "inf": torch.full((2, 3, 24, 24), torch.inf),
    "above one": torch.full((2, 3, 24, 24), 1.5),
    "normalised": torch.full((2, 3, 24, 24), -1.0),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
class TestOperator:
    def apply(self, name, images, seed=0):
        operator = OPERATORS[name]
        values = operator.sample(len(images), generator(seed))
        noise = torch.Generator(images.device).manual_seed(seed) if operator.random else None
        return operator(images, values, generator=noise)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_keeps_shape_dtype_device_and_range(self, name, device, dtype):
        if device == "mps" and dtype == torch.float64:
            pytest.skip("mps has no float64")
        images = batches(1, side=19)[0].to(device, dtype)
        out = self.apply(name, images)
        assert (out.shape, out.dtype, out.device) == (images.shape, images.dtype, images.device)
        assert 0 <= out.min() <= out.max() <= 1

    def test_same_seed_same_result(self, name, device):
        images = batches(1)[0].to(device)
        assert torch.equal(self.apply(name, images), self.apply(name, images))

    def test_leaves_its_input_alone(self, name, device):
        images = batches(1)[0].to(device)
        kept = images.clone()
        self.apply(name, images)
        assert torch.equal(images, kept)

    def test_images_do_not_mix(self, name, device):
        """An image comes out the same whoever its neighbours are."""
        operator, images = OPERATORS[name], batches(1)[0].to(device)
        if operator.random:
            pytest.skip("noise is drawn for the whole batch at once")
        values = operator.sample(len(images), generator())
        alone = operator(images[2:3], None if values is None else values[2:3])
        assert torch.allclose(operator(images, values)[2:3], alone, atol=1e-6)

    def test_gradient_reaches_the_image(self, name, device):
        images = (batches(1)[0] * 0.5 + 0.2).to(device).requires_grad_(True)
        self.apply(name, images).square().sum().backward()
        assert torch.isfinite(images.grad).all()
        assert images.grad.abs().sum() > 0

    @pytest.mark.parametrize("bad", ["grey", "four channels", "one image without batch", "int64"])
    def test_refuses(self, name, device, bad):
        values = OPERATORS[name].sample(2, generator())
        with pytest.raises(ValueError, match="expected"):
            OPERATORS[name](BAD_BATCHES[bad].to(device), values)

    def test_refuses_values_of_another_batch(self, name, device):
        with pytest.raises(ValueError, match="expected"):
            OPERATORS[name](batches(1)[0].to(device), torch.rand(3))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("preset", PRESETS)
def test_pipelines_smooth_and_never_repeat_an_operator(preset, count):
    pipeline, seeds = Pipeline(preset, max_operators=count), generator()
    for _ in range(50):
        (steps,) = pipeline.draw(1, 4, seeds).pipelines
        names = [step.name for step in steps]
        assert len(names) == len(set(names)) == count
        assert SMOOTHING & set(names)


# --- rules and mixings ----------------------------------------------------------------------------------------------


def views(count: int = 5, size: int = 6, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    probs = torch.randn(count, size, classes, generator=generator(1)).softmax(-1)
    features = torch.randn(size, 8, generator=generator(2)) + torch.randn(count, size, 8, generator=generator(3))
    return probs, features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", pooling.RULES)
class TestRule:
    def test_weights_share_one(self, name, dtype):
        probs, features = (t.to(dtype) for t in views())
        weights = pooling.weights(name, probs, features)
        assert weights.shape == probs.shape[:2]
        assert (weights >= 0).all()
        assert torch.allclose(
            weights.sum(0), torch.ones(6, dtype=dtype), atol=1e-2 if dtype == torch.bfloat16 else 1e-6
        )

    @pytest.mark.parametrize("count", [1, 2])
    def test_few_views(self, name, dtype, count):
        probs, features = (t.to(dtype) for t in views(count))
        assert torch.isfinite(pooling.weights(name, probs, features)).all()

    def test_order_of_images_does_not_matter(self, name, dtype):
        probs, features = (t.to(dtype) for t in views())
        order = torch.tensor([3, 1, 5, 0, 2, 4])
        mixed = pooling.weights(name, probs[:, order], features[:, order])
        assert torch.allclose(mixed, pooling.weights(name, probs, features)[:, order], atol=1e-2)

    def test_refuses_what_does_not_belong_together(self, name, dtype):
        with pytest.raises(ValueError, match="expected"):
            pooling.weights(name, views(5)[0], views(4)[1])


@pytest.mark.parametrize("name", mixing.MIXINGS)
@pytest.mark.parametrize("extra", [None, 0, 1, 4])
def test_mixing_weights_share_one(name, extra):
    """With no augmented view, with as few as it takes, and with more."""
    mixer = mixing.create(name)
    probs, features = views(1 if extra is None else 1 + mixer.least_views + extra)
    weights, suspicion = mixer.mix(pooling.weights("cc_drop", probs, features), probs, features)
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(0), torch.ones(6), atol=1e-6)
    assert suspicion.shape == (6,)


# --- predictors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", predictors.PREDICTORS)
class TestPredictor:
    def make(self, name, seed=0):
        predictor = predictors.create(name, classifier(), seed=seed)
        predictor.classifier.eval()
        return predictor

    def test_prediction(self, name, images):
        prediction = self.make(name)(images)
        assert prediction.probs.shape == prediction.logits.shape == (6, CLASSES)
        assert prediction.features.shape == (6, 16)
        assert torch.allclose(prediction.probs.sum(1), torch.ones(6), atol=1e-5)
        assert torch.allclose(prediction.logits.softmax(1), prediction.probs, atol=1e-4)
        weights = prediction.report.weights
        assert torch.allclose(weights.sum(0), torch.ones(6), atol=1e-5)
        views_agree = (weights.unsqueeze(-1) * prediction.report.view_probs).sum(0)
        assert torch.allclose(views_agree, prediction.probs, atol=1e-5)

    def test_same_seed_same_answers(self, name, images):
        one, two = self.make(name), self.make(name)
        for _ in range(2):
            assert torch.equal(one(images).probs, two(images).probs)

    def test_a_draw_can_be_replayed(self, name, images):
        predictor = self.make(name)
        draw = predictor.draw(images)
        first = predictor(images, draw)
        predictor(images)
        assert torch.equal(predictor(images, draw).probs, first.probs)

    def test_untracked_moves_nothing(self, name, images):
        predictor = self.make(name)
        for norm in predictor.classifier.norms():
            norm.train()
        before, state = copy.deepcopy(predictor.classifier.state_dict()), predictor.generator.get_state()
        predictor(images, track=False)
        assert torch.equal(predictor.generator.get_state(), state)
        assert all(torch.equal(t, before[n]) for n, t in predictor.classifier.state_dict().items())
        predictor(images)
        assert not all(torch.equal(t, before[n]) for n, t in predictor.classifier.state_dict().items())

    def test_gradients_reach_images_and_parameters(self, name, images):
        predictor = self.make(name)
        images = images.requires_grad_(True)
        predictor(images).logits.square().sum().backward()
        assert images.grad.abs().sum() > 0
        assert all(p.grad is not None for p in predictor.classifier.parameters())

    def test_over_looks_through_another_classifier(self, name, images):
        predictor = self.make(name)
        other = classifier(seed=9).eval()
        draw = predictor.draw(images)
        moved = predictor.over(other)
        assert moved.classifier is other
        assert not torch.equal(moved(images, draw).probs, predictor(images, draw).probs)

    def test_uint8_equals_its_floats(self, name, images):
        eight = (images * 255).round().byte()
        assert torch.equal(self.make(name)(eight).probs, self.make(name)(eight / 255).probs)

    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_refuses_and_draws_nothing(self, name, bad):
        predictor = self.make(name)
        state = predictor.generator.get_state()
        with pytest.raises((ValueError, TypeError), match="expected"):
            predictor(BAD_BATCHES[bad])
        assert torch.equal(predictor.generator.get_state(), state)

    def test_refuses_a_draw_of_another_batch(self, name, images):
        predictor = self.make(name)
        with pytest.raises(ValueError, match="draw"):
            predictor(images, predictor.draw(images[:3]))


# --- attacks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
class TestAttack:
    def attacked(self, name, norm, images, seed=0):
        model = classifier().eval()
        labels = model(images)[1].argmax(dim=1)
        threat = {"eps": 8 / 255 if norm == "linf" else 1.0, "norm": norm, "step": 2 / 255, "steps": 3}
        before = copy.deepcopy(model.state_dict())
        found = ATTACKS[name].make(model, images, labels, threat, generator(seed))
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        assert not model.training
        return found, model, labels, threat

    def test_keeps_the_budget_on_eight_bits_and_the_model_as_it_was(self, name, norm, images):
        images = (images * 255).round() / 255
        found, _, _, threat = self.attacked(name, norm, images)
        assert found.shape == images.shape
        assert found.min() >= 0
        assert found.max() <= 1
        assert torch.allclose(found * 255, (found * 255).round(), atol=1e-3)
        moved = (found - images).flatten(1).norm(p=torch.inf if norm == "linf" else 2, dim=1)
        assert float(moved.max()) <= threat["eps"] + 1e-5

    def test_does_harm_and_the_same_again(self, name, norm, images):
        found, model, labels, _ = self.attacked(name, norm, images)
        right = (model(found)[1].argmax(dim=1) == labels).sum()
        loss = torch.nn.functional.cross_entropy
        assert right < len(labels) or loss(model(found)[1], labels) > loss(model(images)[1], labels)
        assert torch.equal(found, self.attacked(name, norm, images)[0])


# --- methods on predictors ------------------------------------------------------------------------------------------


def make(method: str, predictor: str, seed: int = 0) -> methods.Method:
    return methods.create(method, predictors.create(predictor, classifier(), seed=seed), **LEARNING.get(method, {}))


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


BY_FEATURES = {"tsd"}  # what the gate lets in changes what it learns


@pytest.mark.parametrize("features", ["gated", "pooled"])
@pytest.mark.parametrize("method", methods.METHODS)
def test_under_a_gate_that_does_not_teach_a_method_learns_as_under_safer(method, features):
    """Bit for bit, on the same views, while the answers are the gate's wherever they are the predictor's."""
    mixings = ({"name": "gate", "teaches": False, "features": features}, None)
    seen = [predictors.create("safer", classifier(), seed=0, mixing=mixing, pipeline="gentle") for mixing in mixings]
    gated, pooled = (methods.create(method, predictor, **LEARNING.get(method, {})) for predictor in seen)
    stream = batches(4, size=8)
    learnt(pooled, stream)
    for images in stream:
        answer = gated(images)
        assert answer.lesson is None
        assert answer.aligned is answer.read is None
        assert answer.answer is None
        if gated.by_predictor:
            shown = (answer.report.weights.unsqueeze(-1) * answer.report.view_probs).sum(dim=0)
            torch.testing.assert_close(answer.probs, shown)
            torch.testing.assert_close(answer.logits.softmax(dim=1), shown, rtol=0, atol=1e-4)
    remembered = {"predictor.seen"} if gated.predictor.memory is not None else set()
    state = {n: t for n, t in gated.state_dict().items() if n not in remembered}
    assert same(state, pooled.state_dict()) == (features == "pooled" or method not in BY_FEATURES)
    frozen = gated.freeze()(stream[0])
    if gated.by_predictor:
        assert not torch.allclose(frozen.probs, pooled.freeze()(stream[0]).probs)


@pytest.mark.parametrize("predictor", predictors.PREDICTORS)
@pytest.mark.parametrize("method", methods.METHODS)
class TestMethod:
    def test_answers(self, method, predictor):
        adapted = make(method, predictor)
        for prediction in adapted.stream(batches(3)):
            assert prediction.probs.shape == (6, CLASSES)
            assert torch.isfinite(prediction.probs).all()
            assert not prediction.probs.requires_grad
            assert not prediction.report.weights.requires_grad

    def test_same_seed_same_stream(self, method, predictor):
        one, two = make(method, predictor), make(method, predictor)
        for a, b in zip(learnt(one, batches(3)), learnt(two, batches(3)), strict=True):
            assert torch.equal(a, b)
        assert same(one.state_dict(), two.state_dict())

    def test_reset_replays(self, method, predictor):
        adapted = make(method, predictor)
        start = adapted.state_dict()
        first = learnt(adapted, batches(3))
        adapted.reset()
        assert same(adapted.state_dict(), start)
        assert all(torch.equal(a, b) for a, b in zip(first, learnt(adapted, batches(3)), strict=True))

    def test_restore_keeps_the_generator_running(self, method, predictor):
        adapted = make(method, predictor)
        start = adapted.state_dict()
        learnt(adapted, batches(2))
        moved = adapted.predictor.generator.get_state()
        adapted.restore()
        assert torch.equal(adapted.predictor.generator.get_state(), moved)
        start.pop("generator")
        after = adapted.state_dict()
        after.pop("generator")
        assert same(after, start)

    def test_save_load_resume_is_bit_identical(self, method, predictor, tmp_path):
        stream = batches(5, size=8)  # the pause is between two updates of the memories that learn every 6 images
        never_stopped = make(method, predictor)
        expected = [p.probs for p in never_stopped.stream(stream)]
        first = make(method, predictor)
        learnt(first, stream[:2])
        first.save(tmp_path / "half.safetensors")
        second = make(method, predictor, seed=77).load(tmp_path / "half.safetensors")
        resumed = learnt(second, stream[2:])
        assert all(torch.equal(a, b) for a, b in zip(expected[2:], resumed, strict=True))
        assert same(second.state_dict(), never_stopped.state_dict())

    def test_predict_moves_nothing_and_says_what_adapting_would_say(self, method, predictor, images):
        adapted = make(method, predictor)
        list(adapted.stream(batches(1)))
        before = adapted.state_dict()
        foreseen = adapted.predict(images)
        assert same(adapted.state_dict(), before)
        assert torch.equal(foreseen.probs, adapted(images).probs)

    def test_an_attacker_can_reach_what_answers(self, method, predictor, images):
        """Where a method says that its predictor answers, it does so inside answering(): else EOT attacks another."""
        adapted = make(method, predictor)
        if not adapted.by_predictor:  # a teacher, prototypes: the bench refuses to attack these this way
            with pytest.raises(ValueError, match="overstate its robustness"):
                check_attackable(method)
            return
        list(adapted.stream(batches(2)))
        foreseen = adapted.predict(images)
        draw = adapted.predictor.draw(images)
        with torch.no_grad(), adapted.answering():
            assert torch.equal(adapted.predictor(images, draw, track=False).probs, foreseen.probs)

    def test_frozen_learns_nothing(self, method, predictor, images):
        adapted = make(method, predictor).freeze()
        before = adapted.state_dict()
        adapted(images)
        after = adapted.state_dict()
        before.pop("generator")
        after.pop("generator")
        assert same(after, before)
        adapted.unfreeze()
        adapted(images)
        if adapted.updates != "none":
            assert not same({k: adapted.state_dict()[k] for k in before}, before)

    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_a_bad_batch_changes_nothing(self, method, predictor, bad):
        adapted = make(method, predictor)
        list(adapted.stream(batches(1)))
        before = adapted.state_dict()
        with pytest.raises((ValueError, TypeError), match="expected"):
            adapted(BAD_BATCHES[bad])
        assert same(adapted.state_dict(), before)

    def test_a_failure_on_the_way_changes_nothing(self, method, predictor, monkeypatch):
        adapted = make(method, predictor)
        list(adapted.stream(batches(1)))
        before = adapted.state_dict()

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory, say")

        monkeypatch.setattr(safer_tta.Classifier, "normalise", fail)  # in whichever model is asked first
        with pytest.raises(RuntimeError, match="out of memory"):
            adapted(batches(1, seed=4)[0])
        assert same(adapted.state_dict(), before)

    def test_works_whatever_mode_the_caller_is_in(self, method, predictor):
        expected = [p.probs for p in make(method, predictor).stream(batches(2))]
        with torch.no_grad():
            quiet = [p.probs for p in make(method, predictor).stream(batches(2))]
        with torch.inference_mode():
            settings = predictors.create(predictor, classifier())
            adapted = safer_tta.adapt(classifier(), method, settings, seed=0, **LEARNING.get(method, {}))
            inference = [p.probs for p in adapted.stream(batches(2))]
        assert all(torch.equal(a, b) for a, b in zip(expected, quiet, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(expected, inference, strict=True))

    @pytest.mark.parametrize("device", DEVICES)
    def test_follows_to_a_device(self, method, predictor, device):
        adapted = make(method, predictor)
        list(adapted.stream(batches(1)))
        adapted.to(device)
        assert adapted(batches(1)[0]).probs.device.type == device
        adapted.reset()

    def test_short_last_batch_and_single_image(self, method, predictor):
        adapted = make(method, predictor)
        list(adapted.stream(batches(2)))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a batch of one image")  # that SAFER says so, once, is tested elsewhere
            for size in (2, 1):
                assert torch.isfinite(adapted(batches(1, size=size)[0]).probs).all()

    def test_unknown_option_is_named(self, method, predictor):
        with pytest.raises(TypeError, match="colour"):
            methods.create(method, predictors.create(predictor, classifier()), colour="red")

    def test_says_what_it_is(self, method, predictor):
        cls = methods.METHODS[method]
        assert cls.name == method
        assert cls.updates in {"none", "norm", "features", "all"}
        described = methods.describe(method)
        assert described["what"]
        assert "forward" in described["cost"]
        if method not in ("none",):
            assert described["paper"], "the module's docstring cites its paper"
