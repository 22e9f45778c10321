"""Better transfer: against straight-line formulas of momentum, input diversity and translation invariance."""

import copy

import pytest
import torch
import torch.nn.functional as F

from safer_tta.attacks import pgd, transfer
from safer_tta.attacks.transfer import diversify, smooth
from safer_tta.errors import InvalidValueError, UnknownNameError
from tests.attacks.parts import EPS, STEPS, ascent, drawings, eight_bit, generator, labels, trained_net
from tests.conftest import CLASSES, classifier, small_net

OFF = {"momentum": 0.0, "diversity": 0.0, "smoothing": 0.0}


@pytest.mark.parametrize(("norm", "eps"), [("linf", EPS), ("l2", 1.0)])
def test_with_everything_off_it_is_pgd(norm, eps):
    threat = {"eps": eps, "step": eps / 4, "steps": 3, "norm": norm}
    expected = pgd(small_net(), eight_bit(), labels(), generator=generator(), **threat)
    assert torch.equal(transfer(small_net(), eight_bit(), labels(), generator=generator(), **OFF, **threat), expected)


def kernel(length):
    """The kernel of the paper: a normal density from −3 to 3 standard deviations, in both directions."""
    line = torch.distributions.Normal(0.0, 1.0).log_prob(torch.linspace(-3, 3, length)).exp()
    grid = torch.outer(line, line)
    return grid / grid.sum()


def test_every_step_is_that_of_the_papers():
    """All three at once, step by step, with the same random numbers."""
    model, images, y, draw = small_net().eval(), eight_bit(side=40) / 255, labels(), generator(3)
    x = (images + (2 * torch.rand(images.shape, generator=draw) - 1) * EPS).clamp(0, 1)
    velocity, used = torch.zeros_like(x), []
    for _ in range(6):
        chance, factor, down, right = torch.rand(4, generator=draw).tolist()
        side = round(40 * (0.9 + 0.1 * factor))
        top, left = int(down * (41 - side)), int(right * (41 - side))
        used.append(chance < 0.5)

        def seen(x, side=side, top=top, left=left):
            small = F.interpolate(x, size=(side, side), mode="bilinear")
            return F.pad(small, (left, 40 - side - left, top, 40 - side - top))

        slope = ascent(lambda x, seen=seen: model(seen(x) if used[-1] else x), x, y)
        slope = F.conv2d(slope, kernel(5).expand(3, 1, 5, 5), padding=2, groups=3)
        velocity = 0.8 * velocity + slope / slope.abs().mean(dim=(1, 2, 3), keepdim=True)
        x = (x + 2 / 255 * velocity.sign()).clamp(images - EPS, images + EPS).clamp(0, 1)
    assert {*used} == {True, False}, "both kinds of steps are compared"
    threat = {"momentum": 0.8, "smoothing": 0.1, "eps": EPS, "step": 2 / 255, "steps": 6}
    found = transfer(model, images, y, generator=generator(3), **threat)
    assert ((found - (x * 255).round() / 255).abs() < 1e-6).float().mean() > 0.999


def test_at_the_papers_side_the_kernel_is_the_papers():
    point = torch.zeros(1, 1, 299, 299)
    point[..., 149, 149] = 1
    expected = F.pad(kernel(15), (142, 142, 142, 142))
    torch.testing.assert_close(smooth(point, 0.05)[0, 0], expected)


def test_images_are_shrunk_by_a_tenth_at_most_and_put_anywhere():
    white, draw, corners = torch.ones(2, 3, 40, 60), generator(), set()
    for _ in range(60):
        rows, columns = diversify(white, 1.0, draw)[0, 0].nonzero().T
        assert 36 <= rows.max() - rows.min() + 1 <= 40
        assert 54 <= columns.max() - columns.min() + 1 <= 60
        corners.add((int(rows.min()), int(columns.min())))
    assert {0, 2} < {top for top, _ in corners}
    assert len(corners) > 8
    assert diversify(white, 0.0, draw) is white


def test_several_models_are_attacked_through_the_mean_of_their_scores():
    models, y = [small_net(seed=seed).eval() for seed in range(3)], labels()
    expected = pgd(lambda x: sum(m(x) for m in models) / 3, eight_bit(), y, generator=generator(), **STEPS)
    found = transfer([models[0], *map(_wrapped, models[1:])], eight_bit(), y, generator=generator(), **OFF, **STEPS)
    assert ((found - expected).abs() < 1e-6).float().mean() > 0.999
    assert not torch.equal(found, transfer(models[0], eight_bit(), y, generator=generator(), **OFF, **STEPS))


def _wrapped(model):
    wrapped = classifier()
    wrapped.model.load_state_dict(model.state_dict())
    return wrapped


def test_all_models_are_left_as_they_were():
    models = [small_net().train(), small_net(seed=1).train()]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    transfer(models, eight_bit(), labels(), steps=2)
    for model, state in zip(models, before, strict=True):
        assert all(module.training for module in model.modules())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_it_carries_over_better_than_pgd():
    (x, y), other = drawings(), trained_net(1)
    threat = {"eps": 16 / 255, "step": 2 / 255, "steps": 20}
    plain = pgd(trained_net(), x, y, generator=generator(), **threat)
    better = transfer(trained_net(), x, y, generator=generator(), **threat)
    left = [(other(images).argmax(dim=1) == y).float().mean() for images in (x / 255, plain, better)]
    assert left[0] > 0.8
    assert left[2] < left[1] - 0.1


def test_a_target_is_what_images_are_read_as():
    x, y = drawings()
    found = transfer(trained_net(), x, y, target="next", eps=32 / 255, generator=generator())
    assert (trained_net()(found).argmax(dim=1) == (y + 1) % CLASSES).float().mean() > 0.9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"momentum": 1.5}, "momentum is 1.5; expected a number from 0 to 1"),
        ({"diversity": -1}, "diversity is -1; expected a number from 0 to 1"),
        ({"smoothing": 15}, "smoothing is 15; expected a number from 0 to 1"),
        ({"predict": []}, "empty list; expected at least one model"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(InvalidValueError, match=message):
        transfer(**{"predict": small_net(), "images": eight_bit(), "labels": labels(), **wrong})
    with pytest.raises(UnknownNameError, match=r"target 'nxt' is unknown .did you mean 'next'"):
        transfer(small_net(), eight_bit(), labels(), target="nxt")
