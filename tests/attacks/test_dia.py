"""The poisoning of neighbours: against its formula, its budget, and the harm it does to others."""

import pytest
import torch
import torch.nn.functional as F

import safer_tta
from safer_tta.attacks import dia
from safer_tta.errors import InvalidTypeError
from safer_tta.models.stream_norm import StreamNorm
from tests.attacks.parts import eight_bit, generator, labels
from tests.conftest import batches, small_net

MINE = torch.tensor([True, False, False, True, False, False])


def predictor(name: str = "plain", **options: object) -> safer_tta.Predictor:
    adapted = safer_tta.adapt(small_net(), "tent", name, seed=0, **options)
    adapted(batches(1)[0])
    return adapted.predictor


def other_loss(predict: safer_tta.Predictor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum over everybody else of min(cross-entropy, 5), image by image."""
    logits = predict(x, track=False).logits
    return sum(F.cross_entropy(logits[i : i + 1], y[i : i + 1]).clamp(max=5) for i in range(len(x)) if not MINE[i])


def test_follows_the_gradient_of_the_others_loss():
    attacked, x, y = predictor(), eight_bit(side=24) / 255, labels()
    expected = x.clone()
    expected[MINE] = 0.5
    for _ in range(3):
        here = expected.clone().requires_grad_(True)
        gradient = torch.autograd.grad(other_loss(attacked, here, y), here)[0]
        expected[MINE] = (expected + 0.1 * gradient.sign())[MINE].clamp(0, 1)
    found = dia(attacked, x, y, MINE, eps=1.0, step=0.1, steps=3, generator=generator())
    torch.testing.assert_close(found[MINE], (expected[MINE] * 255).round() / 255)
    assert torch.equal(found[~MINE], x[~MINE])


def test_leads_one_image_of_others_to_the_class_after_its_own():
    attacked, x, y = predictor(), eight_bit(side=24) / 255, labels()
    expected = x.clone()
    expected[MINE] = 0.5
    for _ in range(3):
        here = expected.clone().requires_grad_(True)
        loss = F.cross_entropy(attacked(here, track=False).logits[1:2], y[1:2] + 1)  # the first that is not hostile
        expected[MINE] = (expected - 0.1 * torch.autograd.grad(loss, here)[0].sign())[MINE].clamp(0, 1)
    threat = {"eps": 1.0, "step": 0.1, "generator": generator()}
    found = dia(attacked, x, y, MINE, target="next", steps=3, **threat)
    torch.testing.assert_close(found[MINE], (expected[MINE] * 255).round() / 255)
    further = dia(attacked, x, y, MINE, target="next", steps=30, **threat)
    assert attacked(further, track=False).labels[1] == y[1] + 1 != attacked(x, track=False).labels[1]


@pytest.mark.parametrize("name", ["plain", "safer", "safer-g"])
@pytest.mark.parametrize("norm", ["stream", "model"])
def test_keeps_the_budget_and_moves_nothing(name, norm):
    adapted = safer_tta.adapt(small_net(), "tent", name, norm=norm, seed=0)
    adapted(batches(1)[0])
    before, images = adapted.state_dict(), eight_bit(side=24)
    threat = {"eps": 8 / 255, "step": 2 / 255, "steps": 3}
    found = dia(adapted.predictor, images, labels(), MINE, **threat, generator=generator())
    difference = (found * 255).round().int() - images.int()
    assert torch.equal(difference.flatten(1).any(dim=1), MINE)
    assert difference.abs().max() <= 8
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())
    assert not any(m.exact for m in adapted.classifier.modules() if isinstance(m, StreamNorm))
    assert torch.equal(found, dia(adapted.predictor, images, labels(), MINE, **threat, generator=generator()))


def test_harms_the_others_through_batch_statistics_only():
    x, y = eight_bit(side=24) / 255, labels()
    through_batch = predictor()
    before = other_loss(through_batch, x, y)
    assert other_loss(through_batch, dia(through_batch, x, y, MINE, generator=generator()), y) > before + 2
    of_source = safer_tta.Plain(safer_tta.Classifier(small_net()).eval(), seed=0)
    found = dia(of_source, x, y, MINE, generator=generator())
    torch.testing.assert_close(other_loss(of_source, found, y), other_loss(of_source, x, y))


def test_goes_through_the_statistics_that_follow_the_stream():
    """A gradient that takes them as given would be zero in a model that normalises each pixel by itself."""
    x, y = eight_bit(side=24) / 255, labels()
    following = predictor(norm="stream")
    found = dia(following, x, y, MINE, generator=generator())
    assert other_loss(following, found, y) > other_loss(following, x, y)


@pytest.mark.parametrize("mine", [torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)])
def test_changes_nothing_where_nobody_can_be_harmed(mine):
    images = eight_bit(side=24)
    assert torch.equal(dia(predictor(), images, labels(), mine, steps=1), images / 255)


@pytest.mark.parametrize("mine", [torch.ones(6), torch.ones(5, dtype=torch.bool)])
def test_refuses_what_does_not_say_which_images_are_the_attackers(mine):
    with pytest.raises(InvalidTypeError, match="a bool for each of the 6 images"):
        dia(predictor(), eight_bit(side=24), labels(), mine)
