"""EOT that is carried through: its gradient, its memory, its restarts, its caution."""

import weakref

import pytest
import torch

import safer_tta
from safer_tta.attacks import apgd_eot, eot_margin, eot_pgd, pgd
from safer_tta.attacks.eot_margin import JUDGES, Aim
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from safer_tta.models.stream_norm import StreamNorm
from tests.attacks.parts import STEPS, drawings, eight_bit, generator, labels, trained_net
from tests.conftest import CLASSES, batches, classifier, small_net


def safer(mixing="none", **options):
    return safer_tta.Safer(classifier().eval(), mixing=mixing, seed=0, **options)


def mean_margin(predictor, x, y, draws, target=None, caution=0.0):
    """All draws at once: the margin of the mean scores, less the mean log-odds of suspicion."""
    answers = [predictor(x, draw, track=False) for draw in draws]
    logits = torch.stack([answer.logits for answer in answers]).mean(dim=0)
    own = torch.nn.functional.one_hot(y, CLASSES).bool()
    if target is None:
        value = logits.masked_fill(own, -torch.inf).amax(dim=1) - logits[own]
    else:
        aimed = own.roll(1, dims=1)
        value = logits[aimed] - logits.masked_fill(aimed, -torch.inf).amax(dim=1)
    if caution:
        odds = [(a.suspicion / (1 - a.suspicion)).log() for a in answers]
        value = value - caution * torch.stack(odds).mean(dim=0)
    return value


@pytest.mark.parametrize(
    ("mixing", "target", "caution"), [("none", None, 0.0), ("none", "next", 0.0), ("gate", None, 0.5)]
)
def test_two_passes_give_the_gradient_of_the_margin_of_mean_scores(mixing, target, caution):
    predictor = safer_tta.Safer(classifier().eval().double(), mixing=mixing, seed=0)
    x, y = torch.cat(batches(4)).double(), labels(24)
    draws = [predictor.draw(x) for _ in range(3)]
    own = x.clone().requires_grad_(True)
    value = mean_margin(predictor, own, y, draws, target, caution)
    expected = torch.autograd.grad(value.sum() / len(x), own)[0]
    aim = Aim(predictor, y, target, caution)
    torch.testing.assert_close(aim.gradient(x, draws) / len(x), expected, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(aim.value(x, draws).double(), value.detach(), rtol=1e-5, atol=1e-6)


def test_the_best_wrong_class_is_that_of_the_mean_and_not_of_each_draw():
    predictor, (x, y) = safer_tta.Safer(trained_net(), seed=0), drawings(20)
    draws = [predictor.draw(x) for _ in range(3)]
    own = (x / 255).requires_grad_(True)
    each = sum(mean_margin(predictor, own, y, [draw]).sum() for draw in draws) / 3
    of_each = torch.autograd.grad(each, own)[0]
    assert not torch.allclose(Aim(predictor, y).gradient(x / 255, draws), of_each, rtol=1e-2, atol=1e-3)


class Kept:
    """A tensor that a graph keeps for its gradient, as an object that can be counted while it lives."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_kept(draws):
    """Return the largest number of values that graphs keep at once."""
    alive, most = weakref.WeakSet(), [0]

    def pack(tensor):
        kept = Kept(tensor.detach())
        alive.add(kept)
        most[0] = max(most[0], sum(one.tensor.numel() for one in alive))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        eot_margin(safer(), eight_bit(side=24), labels(), draws=draws, steps=1, generator=generator())
    return most[0]


def test_memory_does_not_grow_with_draws():
    """The graph of one draw is gone before the next one is passed."""
    assert most_kept(1) > 6 * 3 * 24 * 24
    assert most_kept(8) < 2 * most_kept(1)


def test_every_step_draws_afresh_and_judges_are_others(monkeypatch):
    predictor, made = safer(), []
    original = safer_tta.Safer.draw_views
    monkeypatch.setattr(safer_tta.Safer, "draw_views", lambda *given: made.append(original(*given)) or made[-1])
    eot_margin(predictor, eight_bit(side=24), labels(), draws=2, steps=3, restarts=2)
    assert len(made) == JUDGES + 2 * 3 * 2
    assert len({tuple(stage.seed for stage in draw.pipelines[0]) for draw in made}) == len(made)


def test_restarts_keep_the_best_image_of_each():
    """With pooling by the mean, an image is answered without regard to its neighbours."""
    predictor, (x, y), threat = safer_tta.Safer(trained_net(), pool="mean", seed=0), drawings(10), {"steps": 2}
    known = predictor.fork(seed=int(torch.randint(2**62, (), generator=generator())))
    judges = [known.draw(x) for _ in range(JUDGES)]
    values = []
    for restarts in (1, 2, 4):
        found = eot_margin(predictor, x, y, draws=1, restarts=restarts, generator=generator(), **threat)
        values.append(mean_margin(predictor, found, y, judges))
    assert bool((values[1] >= values[0]).all())
    assert bool((values[2] >= values[1]).all())
    assert bool((values[2] > values[0]).any())


def test_a_cautious_attacker_is_less_suspected():
    predictor, (x, y) = safer_tta.Safer(trained_net(), mixing="gate", seed=0), drawings(64)
    suspect = pgd(trained_net(), x, y, eps=48 / 255, step=8 / 255, steps=10, generator=generator())
    threat = {"draws": 2, "eps": 24 / 255, "step": 4 / 255, "steps": 10}
    suspicion, right = [], []
    for caution in (0.0, 3.0):
        found = eot_margin(predictor, suspect, y, caution=caution, generator=generator(), **threat)
        answers = [predictor(found) for _ in range(5)]
        suspicion.append(torch.stack([answer.suspicion.clamp(1e-6, 1 - 1e-6).logit() for answer in answers]).mean())
        right.append(torch.stack([answer.labels == y for answer in answers]).float().mean())
    assert suspicion[1] < suspicion[0] - 0.5
    assert max(right) < 0.3, "both still attack"


@pytest.mark.parametrize("name", ["safer", "safer-g"])
@pytest.mark.parametrize("inference", [False, True])
def test_keeps_the_budget_and_moves_nothing(name, inference):
    adapted = safer_tta.adapt(small_net(), "pl", name, seed=0)
    adapted(batches(1)[0])
    before, images = adapted.state_dict(), eight_bit(side=24)
    with torch.inference_mode(inference):
        y = labels()
        found = eot_margin(adapted.predictor, images, y, draws=2, restarts=2, generator=generator(), **STEPS)
        again = eot_margin(adapted.predictor, images, y, draws=2, restarts=2, generator=generator(), **STEPS)
    difference = (found * 255).round().int() - images.int()
    assert 0 < difference.abs().max() <= 8
    assert all(torch.equal(tensor, before[key]) for key, tensor in adapted.state_dict().items())
    assert all(p.grad is None for p in adapted.classifier.parameters())
    assert torch.equal(found, again)


@pytest.mark.parametrize("attack", [eot_pgd, eot_margin, apgd_eot])
def test_gradients_go_through_the_statistics_that_follow_the_stream(attack, monkeypatch):
    adapted, exact = safer_tta.adapt(small_net(), "tent", "safer-g", norm="stream", seed=0), []
    layers = [m for m in adapted.classifier.modules() if isinstance(m, StreamNorm)]
    original = safer_tta.Safer.conclude
    monkeypatch.setattr(
        safer_tta.Safer, "conclude", lambda *given: exact.append(all(m.exact for m in layers)) or original(*given)
    )
    attack(adapted.predictor, eight_bit(side=24), labels(), draws=1, steps=1)
    assert layers
    assert all(exact)
    assert not any(layer.exact for layer in layers)


def test_a_target_is_what_images_are_read_as():
    x, y = drawings()
    threat = {"eps": 48 / 255, "step": 4 / 255, "steps": 20}
    predictor = safer_tta.Safer(trained_net(), seed=0)
    found = eot_margin(predictor, x, y, draws=2, target="next", generator=generator(), **threat)
    assert (predictor(found).labels == (y + 1) % CLASSES).float().mean() > 0.8


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"predictor": small_net()}, InvalidTypeError, "predictor is SmallNet; expected a Predictor"),
        ({"caution": 1.0}, InvalidValueError, "caution is 1 and Safer estimates no suspicion; expected 0, or"),
        ({"caution": -1.0}, InvalidValueError, "caution is -1.0; expected a number of at least 0"),
        ({"draws": 0}, InvalidValueError, "draws is 0"),
        ({"restarts": 0}, InvalidValueError, "restarts is 0"),
        ({"momentum": 2}, InvalidValueError, "momentum is 2"),
        ({"target": "dog"}, UnknownNameError, "target 'dog' is unknown"),
    ],
)
def test_impossible_options_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        eot_margin(**{"predictor": safer(), "images": eight_bit(), "labels": labels(), **wrong})
