"""What holds for every attack that follows gradients, whatever its idea: it finds what is certain to exist."""

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta.attacks import ATTACKS, full_threat
from tests.attacks.parts import drawings, eight_bit, generator, trained_net

NAMES = ["pgd", "transfer", "aware", "eot", "eot-margin", "apgd-eot"]
# Without what makes an attack carry over to other models, which makes it weaker on its own.
DIRECT = {
    "transfer": {"diversity": 0.0, "smoothing": 0.0},
    "aware": {"defence": "plain", "draws": 1},
    "eot-margin": {"draws": 1},
    "apgd-eot": {"draws": 1},
}


def attacked(name, model, images, y, eps, steps=20, step=2):
    """Attack a model that answers the same every time, with a budget in levels."""
    known = ATTACKS[name]
    asked = {"step": step / 255, "steps": steps, **DIRECT.get(name, {}), "eps": eps / 255}
    taken = {"eps", *known.options} | (set() if known.own_steps else {"step", "steps"})
    threat = full_threat(name, **{key: value for key, value in asked.items() if key in taken})
    classifier = safer_tta.Classifier(model).eval()
    return known.make(safer_tta.Plain(classifier) if known.live else classifier, images, y, threat, generator())


class Linear(nn.Module):
    """Two classes that are divided by a plane at a known distance, which is all the mean of ± the pixels."""

    def __init__(self, pixels: int, offset: float) -> None:
        super().__init__()
        self.fc = nn.Linear(pixels, 4)
        self.signs = torch.randn(pixels, generator=generator(3)).sign()
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[0], self.fc.weight[1] = self.signs, -self.signs
            self.fc.bias.copy_(torch.tensor([offset * pixels, -offset * pixels, -1e4, -2e4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("name", NAMES)
def test_a_plane_is_crossed_exactly_where_the_budget_reaches_it(name):
    """In l∞, every pixel moves the score by the budget: images nearer to the plane than that are misread, no others."""
    images = 64 + eight_bit(size=12) // 2  # far enough from black and white
    pixels = images[0].numel()
    model = Linear(pixels, 0.0)
    distance = (images.flatten(1).double() * model.signs).mean(dim=1)  # in levels, of either sign
    shift = 6 - distance.mean()
    model = Linear(pixels, float(shift) / 255)
    distance = distance + shift
    assert 0 < distance.min() < 5 < 7 < distance.max()
    for eps in (5, 6, 7):
        assert (distance - eps).abs().min() > 0.05, "no image is so near to the border that rounding decides"
        found = attacked(name, model, images, torch.zeros(12, dtype=torch.long), eps)
        assert torch.equal(model(found).argmax(dim=1) == 1, distance < eps)


@pytest.mark.parametrize("name", NAMES)
def test_larger_budgets_and_more_steps_never_leave_more_and_a_large_budget_leaves_nothing(name):
    (x, y), model = drawings(20), trained_net()

    def left(eps, steps, step=2):
        return int((model(attacked(name, model, x, y, eps, steps, step)).argmax(dim=1) == y).sum())

    assert int((model(x / 255).argmax(dim=1) == y).sum()) == 20
    by_budget = [left(eps, 10) for eps in (1, 3, 6, 12)]
    assert by_budget == sorted(by_budget, reverse=True)
    assert by_budget[0] > by_budget[-1]
    by_steps = [left(6, steps, 1) for steps in (1, 5, 20)]
    assert by_steps == sorted(by_steps, reverse=True)
    assert left(64, 10, 16) <= 1
