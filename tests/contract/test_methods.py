"""One contract for every registered method on every registered predictor."""

import warnings

import pytest
import torch

import safer_tta
from safer_tta import methods, predictors
from safer_tta.bench.experiment import AttackOn, Experiment
from safer_tta.bench.run import check_attackable
from tests.conftest import CLASSES, LEARNING, batches, classifier, identical, learnt, same
from tests.contract.parts import BAD_BATCHES, DEVICES


def make(method: str, predictor: str, seed: int = 0, **options: object) -> methods.Method:
    asked = predictors.create(predictor, classifier(), seed=seed, **options)
    return methods.create(method, asked, **LEARNING.get(method, {}))


@pytest.fixture
def adapted(method: str, predictor: str) -> methods.Method:
    return make(method, predictor)


@pytest.fixture
def before(adapted: methods.Method) -> dict[str, torch.Tensor]:
    """Its state, after it has learnt from a batch."""
    list(adapted.stream(batches(1)))
    return adapted.state_dict()


ALIGNING = {"tsd"}  # learns from the features that the gate lets in


@pytest.mark.parametrize("method", methods.METHODS)
def test_under_the_gate_a_method_learns_as_under_safer(method):
    """Bit for bit, on the same views, while the answers are the gate's wherever they are the predictor's."""
    gated, pooled = make(method, "safer-g"), make(method, "safer", pipeline="gentle")
    stream = batches(4, size=8)
    learnt(pooled, stream)
    for images in stream:
        answer = gated(images)
        if gated.by_predictor:
            shown = (answer.report.weights.unsqueeze(-1) * answer.report.view_probs).sum(dim=0)
            torch.testing.assert_close(answer.probs, shown)
            torch.testing.assert_close(answer.logits.softmax(dim=1), shown, rtol=0, atol=1e-4)
    state = {name: tensor for name, tensor in gated.state_dict().items() if name != "predictor.seen"}
    assert identical(state, pooled.state_dict()) == (method not in ALIGNING)
    frozen = gated.freeze()(stream[0])
    if gated.by_predictor:
        assert not torch.allclose(frozen.probs, pooled.freeze()(stream[0]).probs)


@pytest.mark.parametrize("predictor", predictors.PREDICTORS)
@pytest.mark.parametrize("method", methods.METHODS)
class TestMethod:
    def test_answers(self, adapted):
        for prediction in adapted.stream(batches(3)):
            assert prediction.probs.shape == (6, CLASSES)
            assert torch.isfinite(prediction.probs).all()
            assert not prediction.probs.requires_grad
            assert not prediction.report.weights.requires_grad

    def test_same_seed_same_stream(self, method, predictor, adapted):
        other = make(method, predictor)
        for a, b in zip(learnt(adapted, batches(3)), learnt(other, batches(3)), strict=True):
            assert torch.equal(a, b)
        assert identical(adapted.state_dict(), other.state_dict())

    def test_reset_replays(self, adapted):
        start = adapted.state_dict()
        first = learnt(adapted, batches(3))
        adapted.reset()
        assert identical(adapted.state_dict(), start)
        assert all(torch.equal(a, b) for a, b in zip(first, learnt(adapted, batches(3)), strict=True))

    def test_restore_keeps_the_generator_running(self, adapted):
        start = adapted.state_dict()
        learnt(adapted, batches(2))
        moved = adapted.predictor.generator.get_state()
        adapted.restore()
        assert torch.equal(adapted.predictor.generator.get_state(), moved)
        assert same(adapted.state_dict(), start)

    def test_save_load_resume_is_bit_identical(self, method, predictor, adapted, tmp_path):
        stream = batches(5, size=8)  # the pause is between two updates of the memories that learn every 6 images
        never_stopped = make(method, predictor)
        expected = [p.probs for p in never_stopped.stream(stream)]
        learnt(adapted, stream[:2])
        adapted.save(tmp_path / "half.safetensors")
        second = make(method, predictor, seed=77).load(tmp_path / "half.safetensors")
        resumed = learnt(second, stream[2:])
        assert all(torch.equal(a, b) for a, b in zip(expected[2:], resumed, strict=True))
        assert identical(second.state_dict(), never_stopped.state_dict())

    def test_predict_moves_nothing_and_says_what_adapting_would_say(self, adapted, before, images):
        foreseen = adapted.predict(images)
        assert identical(adapted.state_dict(), before)
        answered = adapted(images)
        assert torch.equal(foreseen.probs, answered.probs)
        torch.testing.assert_close(foreseen.suspicion, answered.suspicion, rtol=0, atol=0)

    def test_an_attacker_can_reach_what_answers(self, method, adapted, images):
        """Where a method says that its predictor answers, it does so inside answering(): else EOT attacks another."""
        if not adapted.by_predictor:  # a teacher, prototypes: the bench refuses to attack these this way
            attack = AttackOn(name="eot", threat={})
            with pytest.raises(ValueError, match="overstate its robustness"):
                check_attackable(Experiment(data="", target="", source={}, method=method, attack=attack))
            return
        list(adapted.stream(batches(2)))
        foreseen = adapted.predict(images)
        draw = adapted.predictor.draw(images)
        with torch.no_grad(), adapted.answering():
            assert torch.equal(adapted.predictor(images, draw, track=False).probs, foreseen.probs)

    def test_frozen_learns_nothing(self, adapted, images):
        start = adapted.state_dict()
        adapted.freeze()(images)
        assert same(adapted.state_dict(), start)
        adapted.unfreeze()(images)
        if adapted.updates != "none":
            assert not same({name: adapted.state_dict()[name] for name in start}, start)

    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_a_bad_batch_changes_nothing(self, adapted, before, bad):
        with pytest.raises((ValueError, TypeError), match="expected"):
            adapted(BAD_BATCHES[bad])
        assert identical(adapted.state_dict(), before)

    def test_a_failure_on_the_way_changes_nothing(self, adapted, before, monkeypatch):
        def fail(*_: object) -> None:
            raise RuntimeError("out of memory, say")

        monkeypatch.setattr(safer_tta.Classifier, "normalise", fail)  # in whichever model is asked first
        with pytest.raises(RuntimeError, match="out of memory"):
            adapted(batches(1, seed=4)[0])
        assert identical(adapted.state_dict(), before)

    def test_works_whatever_mode_the_caller_is_in(self, method, predictor, adapted):
        expected = [p.probs for p in adapted.stream(batches(2))]
        with torch.no_grad():
            quiet = [p.probs for p in make(method, predictor).stream(batches(2))]
        with torch.inference_mode():
            settings = predictors.create(predictor, classifier())
            options = {"norm": "model", "seed": 0, **LEARNING.get(method, {})}
            another = safer_tta.adapt(classifier(), method, settings, **options)
            inference = [p.probs for p in another.stream(batches(2))]
        assert all(torch.equal(a, b) for a, b in zip(expected, quiet, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(expected, inference, strict=True))

    @pytest.mark.parametrize("device", DEVICES)
    def test_follows_to_a_device(self, adapted, device):
        list(adapted.stream(batches(1)))
        adapted.to(device)
        assert adapted(batches(1)[0]).probs.device.type == device
        adapted.reset()

    def test_short_last_batch_and_single_image(self, adapted):
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
        assert described["paper"] or method == "none", "the module's docstring cites its paper"
