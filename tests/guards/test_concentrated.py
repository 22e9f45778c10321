"""The guard sees a stream that shows one class after the other."""

import pytest
import torch

import safer_tta
from safer_tta.guards import Guard
from tests.conftest import small_net
from tests.guards.parts import EVERY, Colours


@pytest.mark.parametrize(("classes", "concentrated"), [(1, True), (2, True), (3, False)])
def test_answers_of_few_classes_are_counted_and_change_nothing(classes, concentrated, caplog):
    """Sixty-four answers in equal shares, as a fixed camera gives them; the advice comes once."""
    guard = Guard(safer_tta.adapt(Colours(), "none", "plain", seed=0), **EVERY)
    images = torch.zeros(16, 3, 8, 8)
    for number in range(16):
        images[number, number % classes] = 1.0
    for _ in range(3):
        guard(images)
    assert guard.counters["concentrated"] == 0  # forty-eight answers are too few to tell
    for _ in range(2):
        guard(images)
    assert guard.counters["concentrated"] == (2 if concentrated else 0)
    assert caplog.text.count("few classes") == concentrated
    assert guard.counters["collapses"] == 0


@pytest.mark.parametrize(("norm", "advised"), [("model", 1), ("stream", 0)])
def test_every_batch_counts_and_the_advice_fits(norm, advised, caplog):
    """Collapses, which make the guard forget what it has seen, do not stop the count."""
    guard = Guard(safer_tta.adapt(small_net(), "tent", "plain", norm=norm, seed=0), policy="warn", least_images=8)
    for _ in range(20):
        guard(torch.zeros(8, 3, 16, 16))
    assert guard.counters["collapses"]
    assert guard.counters["concentrated"] == 13  # from the eighth batch on there are sixty-four answers
    assert caplog.text.count("norm 'stream'") == advised
