"""What poison in whole batches does to the images of others, on a network that has learnt five patterns."""

import functools

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta.attacks import start
from tests.attacks.parts import learnt
from tests.conftest import CLASSES
from tests.contract.parts import generator

BATCHES, SIZE = 16, 20
BUDGETS = {"nhe": {"eps": 16 / 255, "step": 4 / 255, "steps": 5}, "ble": {}}  # BLE with its own, 0.3


def patterns(size, seed):
    """Noisy images of five patterns, as bytes, and the numbers of their patterns."""
    every, noise = torch.rand(CLASSES, 3, 6, 6, generator=generator(99)), generator(seed)
    y = torch.randint(CLASSES, (size,), generator=noise)
    x = 0.35 + 0.3 * nn.functional.interpolate(every, size=24)[y] + 0.1 * torch.randn(size, 3, 24, 24, generator=noise)
    return (x.clamp(0, 1) * 255).round().byte(), y


@functools.cache
def trained():
    return learnt(*patterns(40, seed=1))


def benign_answers(objective=None, method="tent", **options):
    """The answers to others' batches, of which every second is the attacker's, and how many percent are right."""
    adapted = safer_tta.adapt(trained(), method, "plain", mean=0, std=1, seed=0, **options)
    source = safer_tta.Classifier(trained(), mean=0, std=1)
    attacker = start("rttdp", source, objective=objective, **BUDGETS[objective]) if objective else None
    answers, right = [], []
    for number in range(BATCHES):
        images, labels = patterns(SIZE, seed=100 + number)
        mine = torch.full((SIZE,), number % 2 == 0)
        sent = images if attacker is None else attacker.perturb(images, labels, mine, number)
        probs = adapted(sent).probs
        if attacker is not None:
            attacker.see(sent[mine], labels[mine], probs[mine])
        if not mine.any():
            answers.append(probs)
            right.append(probs.argmax(dim=1) == labels)
    return torch.cat(answers), 100 * float(torch.cat(right).double().mean())


@pytest.mark.parametrize("objective", BUDGETS)
def test_a_method_that_learns_is_poisoned(objective):
    assert benign_answers(lr=0.03)[1] > benign_answers(objective, lr=0.03)[1] + 5


def test_one_that_does_not_learn_is_immune_to_the_last_bit():
    assert torch.equal(benign_answers("nhe", "none")[0], benign_answers(None, "none")[0])
