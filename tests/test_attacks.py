"""Attacks: budgets to the last bit, models left as they were, against another library."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta import pooling
from safer_tta.attacks import autoattack, eot_pgd, pgd
from safer_tta.attacks.pgd import BALLS, loss_gradient
from tests.conftest import CLASSES, batches, classifier, small_net

EPS = 8 / 255


def eight_bit(seed: int = 0, size: int = 6, side: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size, 3, side, side), generator=generator, dtype=torch.uint8)


def labels(size: int = 6) -> torch.Tensor:
    return torch.arange(size) % CLASSES


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=30, deadline=None)
@given(levels=st.integers(1, 32), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_linf_budget_holds_exactly_on_eight_bits(levels, steps, seed):
    images = eight_bit(seed)
    attacked = pgd(
        small_net(), images, labels(), eps=levels / 255, step=2 / 255, steps=steps, generator=generator(seed)
    )
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

    def linear(x: torch.Tensor) -> torch.Tensor:
        score = ((x - 0.5) * weights).sum(dim=(1, 2, 3)) / 100
        return torch.stack([-score, score], dim=1)

    y = torch.zeros(6, dtype=torch.long)
    attacked = pgd(linear, images, y, eps=eps, step=eps, steps=4, norm="l2", generator=generator(seed))
    difference = ((attacked * 255).round().double() - images.double()) / 255
    assert difference.flatten(1).norm(dim=1).max() <= eps
    along = (difference * weights).sum(dim=(1, 2, 3)) / weights.norm()
    assert along.min() >= 0.95 * eps, "rounding must not take the attack away"


Scores = Callable[[torch.Tensor], torch.Tensor]


def remembering(predict: Scores) -> tuple[Scores, list[torch.Tensor]]:
    """The same function, and the images it was asked about."""
    asked: list[torch.Tensor] = []

    def scores(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.detach().clone())
        return predict(x)

    return scores, asked


def ascent(predict: Scores, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(nn.functional.cross_entropy(predict(x), y, reduction="sum"), x)[0]


def lengths(delta: torch.Tensor, norm: str) -> torch.Tensor:
    return torch.linalg.vector_norm(delta, ord=torch.inf if norm == "linf" else 2, dim=(1, 2, 3), keepdim=True)


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_pgd_written_out(norm, eps):
    """Where the model is asked, step for step: sign or unit length of the gradient, then back into ball and range.
    Steps as large as the budget, so that every one of them leaves the ball."""
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
def test_pgd_starts_somewhere_in_the_ball(norm, eps):
    images, starts = torch.full((64, 3, 16, 16), 0.5), []
    for seed in range(2):
        scores, asked = remembering(lambda x: x.flatten(1)[:, :CLASSES])
        pgd(scores, images, labels(64), eps=eps, step=eps, steps=1, norm=norm, generator=generator(seed))
        starts.append(asked[0] - images)
        assert lengths(starts[-1], norm).max() <= eps + 1e-6
        assert lengths(starts[-1], norm).max() > 0.9 * eps
        assert abs(starts[-1].mean()) < 0.05 * starts[-1].std(), "in no direction more than in another"
    assert len(torch.cat(starts).flatten(1).unique(dim=0)) == 128, "another one for every image and seed"


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_images_between_the_levels_keep_the_budget_too(norm, eps):
    images = batches(1)[0]
    attacked = pgd(small_net(), images, labels(), eps=eps, step=eps / 4, steps=5, norm=norm, generator=generator())
    difference = (attacked - images).flatten(1)
    length = difference.abs().amax(1) if norm == "linf" else difference.norm(dim=1)
    assert length.max() <= eps + 1e-6
    assert 0 <= attacked.min() <= attacked.max() <= 1
    assert (attacked * 255 - (attacked * 255).round()).abs().max() < 1e-3, "what is saved is what was attacked with"


def test_an_image_between_the_levels_that_reaches_none_stays():
    images = batches(1)[0]
    attacked = pgd(small_net(), images, labels(), eps=0.01, step=0.005, steps=3, norm="l2", generator=generator())
    assert torch.equal(attacked, images)


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.5)])
def test_it_hurts(norm, eps):
    """Accuracy against the model's own answers falls, and more steps hurt more than a random start."""
    model = small_net().eval()
    images = torch.cat(batches(8))
    own = model(images).argmax(1)
    attacked = pgd(model, images, own, eps=eps, step=eps / 4, steps=20, norm=norm, generator=generator())
    assert (model(attacked).argmax(1) == own).float().mean() < 0.5


def test_same_seed_same_attack():
    images = eight_bit()
    one, two = (
        pgd(small_net(), images, labels(), eps=EPS, step=2 / 255, steps=3, generator=generator(4)) for _ in "ab"
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = small_net().train(training)
    model.norm1.eval()  # modes of single layers are somebody's choice too
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    pgd(model, eight_bit(), labels(), eps=EPS, step=2 / 255, steps=3)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_whatever_predicts_can_be_attacked():
    images = batches(1)[0]
    arguments = {"eps": EPS, "step": 2 / 255, "steps": 3}
    model = small_net().eval()
    wrapped = safer_tta.Classifier(model)
    by = [
        pgd(predict, images, labels(), generator=generator(), **arguments)
        for predict in (model, wrapped, safer_tta.Plain(wrapped), lambda x: model(x))
    ]
    assert all(torch.equal(by[0], other) for other in by[1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 8}, "8/255"),
        ({"eps": 0}, "positive"),
        ({"step": 2}, "2/255"),
        ({"steps": 0}, "at least 1"),
        ({"norm": "l1"}, "linf"),
    ],
)
def test_mistakes_are_named(change, says):
    arguments = {"eps": EPS, "step": 2 / 255, "steps": 3, **change}
    with pytest.raises(ValueError, match=says):
        pgd(small_net(), eight_bit(), labels(), **arguments)


@pytest.mark.parametrize("given", [[0] * 8, torch.zeros(8), torch.zeros(3, dtype=torch.int64)])
@pytest.mark.parametrize("attack", [pgd, lambda net, *a, **o: eot_pgd(safer_tta.Plain(net), *a, draws=1, **o)])
def test_labels_that_are_none_are_named(given, attack):
    with pytest.raises(TypeError, match=r"labels are .*; expected a tensor of 8 whole numbers"):
        attack(small_net(), eight_bit(size=8), given, eps=EPS, step=2 / 255, steps=1)


def test_a_predictor_that_returns_no_scores():
    with pytest.raises(TypeError, match="class scores"):
        pgd(lambda x: "cat", eight_bit(), labels(), eps=EPS, step=2 / 255, steps=1)


def test_foolbox_finds_the_same():
    """Another library's PGD, same budget and steps: both bring the model about as low."""
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


@pytest.mark.parametrize("draws", [1, 3])
def test_eot_keeps_the_budget_and_moves_nothing(draws):
    adapted = safer_tta.adapt(small_net(), "pl", seed=0)
    adapted(batches(1)[0])
    before = adapted.state_dict()
    images = eight_bit(side=24)
    attacked = eot_pgd(adapted.predictor, images, labels(), draws=draws, steps=3, generator=generator())
    difference = (attacked * 255).round().int() - images.int()
    assert 0 < difference.abs().max() <= 8
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())
    assert adapted.predictor.validate
    again = eot_pgd(adapted.predictor, images, labels(), draws=draws, steps=3, generator=generator())
    assert torch.equal(attacked, again)


def test_eot_follows_the_mean_gradient_over_fresh_draws(monkeypatch):
    """Done again here: at every step the sign of the gradient averaged over that step's draws, from where it stood."""
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images, y = eight_bit(side=24) / 255, labels()
    calls = []
    original = safer_tta.Safer.predict
    monkeypatch.setattr(
        safer_tta.Safer, "predict", lambda self, x, draw: calls.append((x.detach(), draw)) or original(self, x, draw)
    )
    attacked = eot_pgd(predictor, images, y, draws=3, steps=3, generator=generator())
    monkeypatch.undo()
    assert len(calls) == 9
    views = [draw.views(images) for _, draw in calls]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(views, 2))
    reached = [*(x for x, _ in calls[3::3]), attacked]
    for number, there in enumerate(reached):
        step = calls[3 * number : 3 * number + 3]
        here = step[0][0]
        total = sum(ascent(lambda x, draw=draw: predictor(x, draw, track=False).logits, here, y) for _, draw in step)
        moved = (here + 2 / 255 * total.sign()).clamp(images - EPS, images + EPS).clamp(0, 1)
        expected = (moved * 255).round() / 255 if there is attacked else moved
        assert ((there - expected).abs() < 1e-6).float().mean() > 0.999


@pytest.mark.parametrize("pool", pooling.RULES)
def test_the_attackers_gradient_is_the_true_slope(pool):
    """Through the weights as well as through the answers, against finite differences: a weight taken as constant would
    hide something. One operator a view is a blur or a low pass, and so smooth."""
    predictor = safer_tta.Safer(small_net().double(), pool=pool, pipeline={"max_operators": 1}, seed=0)
    predictor.classifier.eval()
    images, y = batches(1)[0].double() * 0.8 + 0.1, labels()
    draw = predictor.draw(images)

    @torch.no_grad()
    def loss(x: torch.Tensor) -> float:
        return float(nn.functional.cross_entropy(predictor(x, draw, track=False).logits, y, reduction="sum"))

    gradient = loss_gradient(lambda x: predictor(x, draw, track=False).logits, images, y)
    along = torch.randn(images.shape, generator=generator(), dtype=torch.float64)
    slope = (loss(images + 1e-6 * along) - loss(images - 1e-6 * along)) / 2e-6
    assert float((gradient * along).sum()) == pytest.approx(slope, rel=1e-5)


def test_a_predictor_is_attacked_under_the_draw_it_would_make_next():
    """The same at every step, and it is still the next one afterwards."""
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images, arguments = batches(1)[0], {"eps": EPS, "step": 2 / 255, "steps": 3}
    state = predictor.generator.get_state()
    attacked = pgd(predictor, images, labels(), generator=generator(), **arguments)
    assert torch.equal(predictor.generator.get_state(), state)
    draw = predictor.draw(images)
    fixed = pgd(lambda x: predictor(x, draw, track=False).logits, images, labels(), generator=generator(), **arguments)
    assert torch.equal(attacked, fixed)


def test_an_attacker_who_knows_safer_hurts_it_more():
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images = torch.cat(batches(6))
    own = predictor(images, track=False).labels
    transferred = pgd(predictor.classifier, images, own, eps=EPS, step=2 / 255, steps=10, generator=generator())
    known = eot_pgd(predictor, images, own, draws=4, generator=generator())

    def remaining(x: torch.Tensor) -> float:
        return sum((predictor(x).labels == own).float().mean().item() for _ in range(6)) / 6

    assert remaining(known) < remaining(transferred)


def test_eot_needs_a_draw():
    with pytest.raises(ValueError, match="at least 1"):
        eot_pgd(safer_tta.Safer(classifier()), eight_bit(), labels(), draws=0)


def test_autoattack_with_too_few_classes():
    pytest.importorskip("pyautoattack")
    with pytest.raises(ValueError, match=r"knows 3 classes.*Use pgd"):
        autoattack(small_net(classes=3), eight_bit(size=2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("classes", [5, 12])
def test_autoattack_with_few_classes(classes):
    """Its targeted parts try nine classes and index out of range with fewer than ten; ours limits them."""
    pytest.importorskip("pyautoattack")
    model = small_net(classes=classes).eval()
    images = eight_bit(size=4)
    own = model(images / 255).argmax(1)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seen = []
    attacked, accuracy = autoattack(
        model, images, own, components=("apgd-ce", "apgd-t", "fab-t"), progress=lambda *a: seen.append(a)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert list(accuracy) == ["clean", "apgd-ce", "apgd-t", "fab-t", "rounded"]
    assert accuracy["clean"] == 100
    assert [name for name, _ in seen] == ["apgd-ce", "apgd-t", "fab-t"]
    assert ((attacked * 255).round().int() - images.int()).abs().max() <= 8
    assert accuracy["fab-t"] <= accuracy["apgd-ce"] <= 100


@pytest.mark.parametrize(("norm", "theirs", "eps"), [("linf", "Linf", 2 / 255), ("l2", "L2", 0.3)])
def test_autoattack_is_theirs_on_the_images_that_stand(norm, theirs, eps):
    """Both components by the package itself: the second on what withstood the first, and nothing on what was wrong."""
    package = pytest.importorskip("pyautoattack")
    model, images = small_net().eval(), eight_bit(size=10)
    floats = images / 255
    y = model(floats).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    expected, accuracy = floats.clone(), []
    for component in ("apgd-ce", "fab-t"):
        attack = package.AutoAttack(model, norm=theirs, eps=eps, version="standard", seed=5)
        attack.attacks_to_run, attack.fab.n_target_classes = [component], CLASSES - 1
        standing = model(expected).argmax(1) == y
        expected[standing] = attack.run_standard_evaluation(floats[standing], y[standing])[0]
        accuracy.append(100 * (model(expected).argmax(1) == y).float().mean().item())
    assert 90 > accuracy[0] > accuracy[1], "each has something to find and something to leave"
    attacked, ours = autoattack(model, images, y, eps=eps, norm=norm, seed=5, components=("apgd-ce", "fab-t"))
    assert [ours["clean"], ours["apgd-ce"], ours["fab-t"]] == pytest.approx([90, *accuracy])
    assert torch.equal(attacked, BALLS[norm].round(floats, expected, eps))
    assert torch.equal(attacked[0], floats[0])
    assert ours["rounded"] == pytest.approx(100 * (model(attacked).argmax(1) == y).float().mean().item())


def test_autoattack_draws_by_its_seed():
    pytest.importorskip("pyautoattack")
    model, images = small_net().eval(), eight_bit(size=4)
    y = model(images / 255).argmax(1)
    one, again, other = (autoattack(model, images, y, seed=seed, components=("square",))[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.allclose(one * 255, (one * 255).round(), atol=1e-4)


def test_autoattack_leaves_modes_and_gradients():
    pytest.importorskip("pyautoattack")
    model = small_net().train()
    model.norm1.eval()
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    modes = [m.training for m in model.modules()]
    images = eight_bit(size=3)
    with torch.inference_mode():
        autoattack(model, images, labels(3), components=("fab-t",))
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["fc.weight"]
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))
    with pytest.raises(ValueError, match="expected"):
        autoattack(model, images.float(), labels(3))


def test_labels_made_under_inference_mode():
    model = small_net()
    with torch.inference_mode():
        y = labels()
        attacked = pgd(model, eight_bit(), y, eps=EPS, step=2 / 255, steps=1)
    assert attacked.shape == (6, 3, 16, 16)


def test_a_method_is_not_attacked_by_mistake():
    with pytest.raises(TypeError, match="predictor"):
        pgd(safer_tta.adapt(small_net()), eight_bit(), labels(), eps=EPS, step=2 / 255, steps=1)


def test_autoattack_takes_no_eps_of_eight():
    pytest.importorskip("pyautoattack")
    with pytest.raises(ValueError, match="8/255"):
        autoattack(small_net(), eight_bit(), labels(), eps=8)


def test_what_cannot_be_attacked_is_refused_by_its_kind(model, images):
    labels = torch.zeros(len(images), dtype=torch.long)
    adapted = safer_tta.adapt(model, seed=0)
    for wrong in (adapted, model):
        with pytest.raises(TypeError, match=f"predictor is {type(wrong).__name__}; expected a Predictor"):
            eot_pgd(wrong, images, labels, draws=1, steps=1)
    with pytest.raises(TypeError, match="model is Safer; expected a model or a Classifier"):
        autoattack(adapted.predictor, images, labels)
