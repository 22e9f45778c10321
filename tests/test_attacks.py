"""Attacks: budgets to the last bit, models left as they were, against another library."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta.attacks import autoattack, eot_pgd, pgd
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
def test_l2_budget_holds_exactly_on_eight_bits(eps, seed):
    images = eight_bit(seed)
    attacked = pgd(small_net(), images, labels(), eps=eps, step=eps / 3, steps=4, norm="l2", generator=generator(seed))
    difference = ((attacked * 255).round().double() - images.double()) / 255
    length = difference.flatten(1).norm(dim=1)
    assert length.max() <= eps
    assert length.min() >= 0.95 * eps - 2 / 255, "rounding must not take the attack away"


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_images_between_the_levels_keep_the_budget_too(norm, eps):
    images = batches(1)[0]
    attacked = pgd(small_net(), images, labels(), eps=eps, step=eps / 4, steps=5, norm=norm, generator=generator())
    difference = (attacked - images).flatten(1)
    length = difference.abs().amax(1) if norm == "linf" else difference.norm(dim=1)
    assert length.max() <= eps + 1e-6
    assert 0 <= attacked.min() <= attacked.max() <= 1


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
    """One step, done again here: the sign of the gradient averaged over the recorded draws, from the recorded start."""
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images, y = eight_bit(side=24) / 255, labels()
    calls = []
    original = safer_tta.Safer.predict
    monkeypatch.setattr(
        safer_tta.Safer, "predict", lambda self, x, draw: calls.append((x.detach(), draw)) or original(self, x, draw)
    )
    attacked = eot_pgd(predictor, images, y, draws=4, steps=1, generator=generator())
    monkeypatch.undo()
    assert len({id(draw) for _, draw in calls}) == 4
    start, total = calls[0][0], torch.zeros_like(images)
    for _, draw in calls:
        x = start.clone().requires_grad_(True)
        loss = nn.functional.cross_entropy(predictor(x, draw, track=False).logits, y, reduction="sum")
        total += torch.autograd.grad(loss, x)[0]
    moved = (start + 2 / 255 * total.sign()).clamp(images - EPS, images + EPS).clamp(0, 1)
    expected = (moved * 255).round() / 255
    assert ((attacked - expected).abs() < 1e-6).float().mean() > 0.999


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
