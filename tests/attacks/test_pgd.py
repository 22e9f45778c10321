import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta.attacks import eot_pgd, pgd
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import EPS, STEPS, ascent, eight_bit, generator, labels
from tests.conftest import CLASSES, batches, classifier, small_net


@settings(max_examples=30, deadline=None)
@given(levels=st.integers(1, 32), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_linf_budget_holds_exactly_on_eight_bits(levels, steps, seed):
    images = eight_bit(seed)
    threat = {"eps": levels / 255, "step": 2 / 255, "steps": steps}
    attacked = pgd(small_net(), images, labels(), **threat, generator=generator(seed))
    whole = attacked * 255
    assert torch.allclose(whole, whole.round(), atol=1e-4)
    difference = whole.round().int() - images.int()
    assert difference.abs().max() <= levels
    assert difference.abs().max() > 0


@settings(max_examples=20, deadline=None)
@given(eps=st.floats(0.3, 5), seed=st.integers(0, 1000))
def test_l2_budget_is_used_and_holds_exactly_on_eight_bits(eps, seed):
    """Against a linear model the best attack is known: all of the budget along its weights."""
    images = 100 + eight_bit(seed) // 5  # far enough from black and white
    weights = torch.rand(images.shape[1:], generator=generator(seed)) + 0.5
    weights *= torch.randn(weights.shape, generator=generator(seed)).sign()

    def linear(x):
        score = ((x - 0.5) * weights).sum(dim=(1, 2, 3)) / 100
        return torch.stack([-score, score], dim=1)

    y = torch.zeros(6, dtype=torch.long)
    attacked = pgd(linear, images, y, eps=eps, step=eps, steps=4, norm="l2", generator=generator(seed))
    difference = ((attacked * 255).round().double() - images.double()) / 255
    assert difference.flatten(1).norm(dim=1).max() <= eps
    along = (difference * weights).sum(dim=(1, 2, 3)) / weights.norm()
    assert along.min() >= 0.95 * eps, "rounding must not take the attack away"


def remembering(predict):
    """Return the same function, and the images that it was asked about."""
    asked = []

    def scores(x):
        asked.append(x.detach().clone())
        return predict(x)

    return scores, asked


def lengths(delta, norm):
    return torch.linalg.vector_norm(delta, ord=torch.inf if norm == "linf" else 2, dim=(1, 2, 3), keepdim=True)


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_every_step_is_that_of_the_paper(norm, eps):
    """A step follows the sign or the unit length of the gradient, and goes back into ball and range. Steps are as large
    as the budget, so every one of them leaves the ball."""
    model, images, y = small_net().eval(), eight_bit() / 255, labels()
    predict, asked = remembering(model)
    attacked = pgd(predict, images, y, eps=eps, step=eps, steps=4, norm=norm, generator=generator())
    assert len(asked) == 4
    x = asked[0]
    for following in (*asked[1:], None):
        gradient = ascent(model, x, y)
        delta = x + eps * (gradient.sign() if norm == "linf" else gradient / lengths(gradient, norm)) - images
        within = delta.clamp(-eps, eps) if norm == "linf" else delta * (eps / lengths(delta, norm)).clamp(max=1)
        x = (images + within).clamp(0, 1)
        if following is not None:
            torch.testing.assert_close(following, x, rtol=0, atol=1e-6)
            x = following
    if norm == "linf":
        torch.testing.assert_close(attacked, (x * 255).round() / 255, rtol=0, atol=1e-6)
    else:
        assert torch.cosine_similarity((attacked - images).flatten(1), (x - images).flatten(1)).min() > 0.99


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_the_start_is_random_in_the_ball(norm, eps):
    images, starts = torch.full((64, 3, 16, 16), 0.5), []
    for seed in range(2):
        scores, asked = remembering(lambda x: x.flatten(1)[:, :CLASSES])
        pgd(scores, images, labels(64), eps=eps, step=eps, steps=1, norm=norm, generator=generator(seed))
        starts.append(asked[0] - images)
        assert lengths(starts[-1], norm).max() <= eps + 1e-6
        assert lengths(starts[-1], norm).max() > 0.9 * eps
        assert abs(starts[-1].mean()) < 0.05 * starts[-1].std(), "no direction is preferred"
    assert len(torch.cat(starts).flatten(1).unique(dim=0)) == 128, "every image and seed has its own"


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_images_between_the_levels_keep_the_budget(norm, eps):
    images = batches(1)[0]
    attacked = pgd(small_net(), images, labels(), eps=eps, step=eps / 4, steps=5, norm=norm, generator=generator())
    difference = (attacked - images).flatten(1)
    length = difference.abs().amax(1) if norm == "linf" else difference.norm(dim=1)
    assert length.max() <= eps + 1e-6
    assert 0 <= attacked.min() <= attacked.max() <= 1
    assert (attacked * 255 - (attacked * 255).round()).abs().max() < 1e-3, "what is saved is what was attacked with"


def test_an_image_that_reaches_no_level_stays():
    images = batches(1)[0]
    attacked = pgd(small_net(), images, labels(), eps=0.01, step=0.005, steps=3, norm="l2", generator=generator())
    assert torch.equal(attacked, images)


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.5)])
def test_the_accuracy_on_the_models_own_answers_falls(norm, eps):
    model = small_net().eval()
    images = torch.cat(batches(8))
    own = model(images).argmax(1)
    attacked = pgd(model, images, own, eps=eps, step=eps / 4, steps=20, norm=norm, generator=generator())
    assert (model(attacked).argmax(1) == own).float().mean() < 0.5


def test_foolbox_is_as_strong():
    foolbox = pytest.importorskip("foolbox")
    model = small_net().eval()
    images = (torch.cat(batches(8)) * 255).round() / 255
    own = model(images).argmax(1)
    ours = pgd(model, images, own, eps=EPS, step=2 / 255, steps=20, generator=generator())
    attack = foolbox.attacks.LinfPGD(abs_stepsize=2 / 255, steps=20, random_start=True)
    torch.manual_seed(0)
    _, theirs, _ = attack(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), images, own, epsilons=EPS)
    remaining = [(model(x).argmax(1) == own).float().mean().item() for x in (ours, theirs)]
    assert remaining[0] == pytest.approx(remaining[1], abs=0.05)
    losses = [nn.functional.cross_entropy(model(x), own).item() for x in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = small_net().train(training)
    model.norm1.eval()  # modes of single layers are kept too
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    pgd(model, eight_bit(), labels(), eps=EPS, step=2 / 255, steps=3)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_models_classifiers_predictors_and_functions_can_be_attacked():
    images = batches(1)[0]
    model = small_net().eval()
    wrapped = safer_tta.Classifier(model)
    own = pgd(model, images, labels(), generator=generator(), **STEPS)
    for predict in (wrapped, safer_tta.Plain(wrapped), lambda x: model(x)):
        assert torch.equal(pgd(predict, images, labels(), generator=generator(), **STEPS), own)


def test_a_predictor_is_attacked_under_its_next_draw():
    """The draw is the same at every step, and the predictor makes it afterwards."""
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images = batches(1)[0]
    state = predictor.generator.get_state()
    attacked = pgd(predictor, images, labels(), generator=generator(), **STEPS)
    assert torch.equal(predictor.generator.get_state(), state)
    draw = predictor.draw(images)
    fixed = pgd(lambda x: predictor(x, draw, track=False).logits, images, labels(), generator=generator(), **STEPS)
    assert torch.equal(attacked, fixed)


def test_labels_may_be_made_under_inference_mode():
    model = small_net()
    with torch.inference_mode():
        assert pgd(model, eight_bit(), labels(), **STEPS).shape == (6, 3, 16, 16)


IMPOSSIBLE = [("eps", 8, "8/255"), ("eps", 0, "positive"), ("step", 2, "2/255"), ("steps", 0, "at least 1")]


@pytest.mark.parametrize(("setting", "value", "message"), [*IMPOSSIBLE, ("norm", "l1", "linf")])
def test_an_impossible_threat_is_refused(setting, value, message):
    with pytest.raises(InvalidValueError, match=message):
        pgd(small_net(), eight_bit(), labels(), **{**STEPS, setting: value})


@pytest.mark.parametrize("given", [[0] * 8, torch.zeros(8), torch.zeros(3, dtype=torch.int64)])
@pytest.mark.parametrize("attack", [pgd, lambda net, *a, **o: eot_pgd(safer_tta.Plain(net), *a, draws=1, **o)])
def test_invalid_labels_are_refused(given, attack):
    with pytest.raises(InvalidTypeError, match=r"labels are .*; expected a tensor of 8 whole numbers"):
        attack(small_net(), eight_bit(size=8), given, eps=EPS, step=2 / 255, steps=1)


def test_methods_and_functions_without_scores_are_refused():
    with pytest.raises(InvalidTypeError, match="class scores"):
        pgd(lambda x: "cat", eight_bit(), labels(), **STEPS)
    with pytest.raises(InvalidTypeError, match=r"predict is a method.*; expected its predictor"):
        pgd(safer_tta.adapt(small_net()), eight_bit(), labels(), **STEPS)
