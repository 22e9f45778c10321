"""Poison of uncertainty: against its formula, and as copies ahead of a stream."""

import torch
import torch.nn.functional as F

from safer_tta.attacks import ATTACKS, full_threat, tepa
from safer_tta.data import ArrayStore, open_dataset
from safer_tta.training import attacked_copies
from tests.attacks.parts import eight_bit, generator
from tests.conftest import classifier, small_net

BUDGET = {"eps": 32 / 255, "step": 4 / 255, "steps": 12}


def entropy(logits):
    probs = logits.softmax(dim=1)
    return -(probs * probs.log()).sum(dim=1)


def test_follows_the_sum_of_gradients_of_the_entropy_of_shrunken_images():
    """With momentum 1, and diversity for every step."""
    model, x, randomness = small_net().eval(), eight_bit(side=24) / 255, generator(2)
    expected, total = (x + (2 * torch.rand(x.shape, generator=randomness) - 1) * 32 / 255).clamp(0, 1), 0
    for _ in range(3):
        here = expected.clone().requires_grad_(True)
        _, factor, down, right = torch.rand(4, generator=randomness).tolist()
        side = round(24 * (0.9 + 0.1 * factor))
        top, left = int(down * (25 - side)), int(right * (25 - side))
        shrunk = F.interpolate(here, size=(side, side), mode="bilinear", align_corners=False)
        padded = F.pad(shrunk, (left, 24 - side - left, top, 24 - side - top))
        gradient = torch.autograd.grad(entropy(model(padded)).sum(), here)[0]
        total = total + gradient / gradient.abs().mean(dim=(1, 2, 3), keepdim=True)
        moved = expected + 4 / 255 * total.sign()
        expected = torch.minimum(torch.maximum(moved, x - 32 / 255), x + 32 / 255).clamp(0, 1)
    found = tepa(small_net(), x, generator=generator(2), diversity=1.0, eps=32 / 255, step=4 / 255, steps=3)
    torch.testing.assert_close(found, (expected * 255).round() / 255)


def test_makes_a_model_unsure():
    model, x = small_net().eval(), eight_bit(side=24) / 255
    before, after = (entropy(model(images)).mean() for images in (x, tepa(model, x, generator=generator(), **BUDGET)))
    assert after > before + 0.05


def test_the_defaults_are_the_papers_and_copies_are_made_ahead(tmp_path):
    threat = full_threat("tepa")
    assert threat == {"eps": 32 / 255, "norm": "linf", "step": 1 / 255, "steps": 200, "momentum": 1.0, "diversity": 0.5}
    assert not ATTACKS["tepa"].live
    sketch = open_dataset("synthetic", count=8).domain("sketch")
    model = classifier(classes=7).eval()
    copies = attacked_copies(sketch, model, ArrayStore(tmp_path), source="s", attack="tepa", threat=BUDGET)
    clean, poisoned = (torch.tensor(images) / 255 for images in (sketch.images, copies))
    assert (clean - poisoned).abs().max() <= 32 / 255 + 1e-6
    assert entropy(model(poisoned)[1]).mean() > entropy(model(clean)[1]).mean()
