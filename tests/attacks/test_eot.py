import itertools

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import pooling
from safer_tta.attacks import eot_pgd, pgd
from safer_tta.attacks.pgd import loss_gradient
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import EPS, ascent, eight_bit, generator, labels
from tests.conftest import batches, classifier, small_net


@pytest.mark.parametrize(("predictor", "draws"), [("safer", 1), ("safer", 3), ("safer-g", 2)])
def test_keeps_the_budget_and_moves_nothing(predictor, draws):
    adapted = safer_tta.adapt(small_net(), "pl", predictor, seed=0)
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


def test_follows_the_mean_gradient_over_fresh_draws(monkeypatch):
    """Every step is computed again: the sign of the gradient, averaged over the draws of that step."""
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images, y = eight_bit(side=24) / 255, labels()
    calls = []
    original = safer_tta.Safer.show
    with monkeypatch.context() as patch:
        patch.setattr(safer_tta.Safer, "show", lambda self, *given: calls.append(given) or original(self, *given))
        attacked = eot_pgd(predictor, images, y, draws=3, steps=3, generator=generator())
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
def test_the_gradient_is_the_true_slope(pool):
    """It goes through the weights as well as through the answers, as finite differences show. With one operator, a view
    is a blur or a low pass, which is smooth."""
    predictor = safer_tta.Safer(small_net().double(), pool=pool, pipeline={"max_operators": 1}, seed=0)
    predictor.classifier.eval()
    images, y = batches(1)[0].double() * 0.8 + 0.1, labels()
    draw = predictor.draw(images)

    @torch.no_grad()
    def loss(x):
        return float(nn.functional.cross_entropy(predictor(x, draw, track=False).logits, y, reduction="sum"))

    gradient = loss_gradient(lambda x: predictor(x, draw, track=False).logits, images, y)
    along = torch.randn(images.shape, generator=generator(), dtype=torch.float64)
    slope = (loss(images + 1e-6 * along) - loss(images - 1e-6 * along)) / 2e-6
    assert float((gradient * along).sum()) == pytest.approx(slope, rel=1e-5)


def test_an_attacker_with_knowledge_of_safer_is_stronger():
    predictor = safer_tta.Safer(classifier(), seed=0)
    predictor.classifier.eval()
    images = torch.cat(batches(6))
    own = predictor(images, track=False).labels
    transferred = pgd(predictor.classifier, images, own, eps=EPS, step=2 / 255, steps=10, generator=generator())
    known = eot_pgd(predictor, images, own, draws=4, generator=generator())

    def remaining(x):
        return sum((predictor(x).labels == own).float().mean().item() for _ in range(6)) / 6

    assert remaining(known) < remaining(transferred)


def test_zero_draws_and_what_is_no_predictor_are_refused():
    with pytest.raises(InvalidValueError, match=r"draws is 0; expected .* at least 1"):
        eot_pgd(safer_tta.Safer(classifier()), eight_bit(), labels(), draws=0)
    for wrong in (small_net(), safer_tta.adapt(small_net())):
        with pytest.raises(InvalidTypeError, match=f"predictor is {type(wrong).__name__}; expected a Predictor"):
            eot_pgd(wrong, eight_bit(), labels(), draws=1, steps=1)
