import pytest
import torch

from safer_tta.attacks.goals import cross_entropy, margin, rivals
from safer_tta.attacks.pgd import loss_gradient
from tests.attacks.parts import eight_bit, labels
from tests.conftest import CLASSES, small_net

LOGITS = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
LABELS = torch.tensor([0, 2])


def test_the_best_wrong_class_is_raised_and_the_true_one_lowered():
    raised, lowered = rivals(LOGITS, LABELS)
    assert (raised.flatten().tolist(), lowered.flatten().tolist()) == ([2, 1], [0, 2])
    assert margin(LOGITS, raised, lowered).tolist() == [-1, 1]


def test_a_target_is_raised_and_the_best_of_the_others_lowered():
    raised, lowered = rivals(LOGITS, LABELS, "next")
    assert (raised.flatten().tolist(), lowered.flatten().tolist()) == ([1, 0], [0, 1])
    assert margin(LOGITS, raised, lowered).tolist() == [-2, -5]


def test_with_a_target_the_gradient_goes_down_the_loss_of_the_next_class():
    model, images, y = small_net().eval(), eight_bit() / 255, labels()
    towards = loss_gradient(model, images, (y + 1) % CLASSES)
    assert torch.equal(loss_gradient(model, images, y, target="next"), -towards)
    expected = torch.nn.functional.cross_entropy(LOGITS, torch.tensor([1, 0]), reduction="sum")
    assert float(cross_entropy(LOGITS, LABELS, "next")) == pytest.approx(-float(expected))
