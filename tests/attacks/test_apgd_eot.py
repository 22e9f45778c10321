import pytest
import torch

import safer_tta
from safer_tta.attacks import apgd_eot
from safer_tta.attacks.eot_margin import JUDGES
from safer_tta.attacks.pgd import BALLS
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import EPS, drawings, eight_bit, generator, labels, trained_net
from tests.conftest import batches, classifier, small_net

package = pytest.importorskip("pyautoattack")


@pytest.mark.parametrize(("norm", "theirs", "eps"), [("linf", "Linf", 4 / 255), ("l2", "L2", 1.5)])
def test_it_is_the_packages_apgd_and_keeps_the_best_of_both_losses(norm, theirs, eps):
    """On a model that answers the same every time, so that only the random starts matter."""
    (x, y), draw, made = drawings(40), generator(5), []
    images, predictor = x / 255, safer_tta.Plain(trained_net(), seed=0)

    def predict(images):
        return predictor(images, track=False).logits

    torch.randint(2**62, (), generator=draw)  # the seed of the views
    with torch.random.fork_rng([]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=draw)))
        for loss in ("ce", "dlr"):
            attack = package.autopgd_base.APGDAttack(predict, n_iter=8, norm=theirs, eps=eps, loss=loss)
            attack.init_hyperparam(images)
            highest, _, _, misread = attack.attack_single_run(images, y)
            made += [BALLS[norm].round(images, found.detach(), eps) for found in (highest, misread)]
    rows = torch.arange(len(y))
    margins = []
    for found in made:
        logits = predict(found).detach()
        own = logits[rows, y].clone()
        logits[rows, y] = -torch.inf
        margins.append(logits.amax(dim=1) - own)
    best = torch.stack(margins).argmax(dim=0)
    assert len(best.unique()) > 1, "no search is the best for all images"
    found = apgd_eot(predictor, x, y, draws=1, steps=8, eps=eps, norm=norm, generator=generator(5))
    assert torch.equal(found, torch.stack(made)[best, rows])


def test_gradients_are_averaged_over_fresh_draws_of_the_whole_batch(monkeypatch):
    predictor, asked = safer_tta.Safer(classifier().eval(), seed=0), []
    original = safer_tta.Safer.show
    monkeypatch.setattr(safer_tta.Safer, "show", lambda self, *given: asked.append(given) or original(self, *given))
    y = predictor(batches(1)[0], track=False).labels
    y[:3] = (y[:3] + 1) % 5  # which are misread from the start
    asked.clear()
    apgd_eot(predictor, batches(1)[0], y, draws=3, steps=2)
    assert {len(images) for images, _ in asked} == {6}
    searched = [draw for images, draw in asked if images.requires_grad]
    assert len(searched) == 2 * (2 + 1) * 3
    assert len({id(draw) for draw in searched}) == len(searched)
    assert len(asked) - len(searched) == 4 * JUDGES


@pytest.mark.parametrize("name", ["safer", "safer-g"])
def test_keeps_the_budget_and_moves_nothing(name):
    adapted = safer_tta.adapt(small_net(), "pl", name, seed=0)
    adapted(batches(1)[0])
    before, images, randomness = adapted.state_dict(), eight_bit(side=24), torch.get_rng_state()
    across = images.to(memory_format=torch.channels_last)  # as streams lay them out
    with torch.inference_mode():
        found = apgd_eot(adapted.predictor, across, labels(), draws=2, steps=3, generator=generator())
    difference = (found * 255).round().int() - images.int()
    assert 0 < difference.abs().max() <= 8
    assert all(torch.equal(tensor, before[key]) for key, tensor in adapted.state_dict().items())
    assert all(p.grad is None for p in adapted.classifier.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    torch.rand(3)
    again = apgd_eot(adapted.predictor, images, labels(), draws=2, steps=3, generator=generator())
    assert torch.equal(found, again)


def test_two_classes_are_attacked_through_the_cross_entropy():
    predictor = safer_tta.Plain(small_net(classes=2).eval())
    y = predictor(batches(1)[0], track=False).labels
    found = apgd_eot(predictor, batches(1)[0], y, draws=1, steps=5, eps=EPS)
    assert predictor(found).probs[torch.arange(6), y].mean() < predictor(batches(1)[0]).probs[torch.arange(6), y].mean()


def test_models_and_impossible_budgets_are_refused():
    predictor = safer_tta.Plain(small_net())
    with pytest.raises(
        InvalidTypeError, match=r"predictor is SmallNet; expected a Predictor\. Attack a model with auto"
    ):
        apgd_eot(small_net(), eight_bit(), labels())
    with pytest.raises(InvalidValueError, match="8/255"):
        apgd_eot(predictor, eight_bit(), labels(), eps=8)
    with pytest.raises(InvalidValueError, match="draws is 0"):
        apgd_eot(predictor, eight_bit(), labels(), draws=0)
