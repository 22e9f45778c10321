"""Streams that are attacked from some batch on, for the tests of alarms."""

from pathlib import Path

import numpy as np
import torch

from safer_tta._internal.seeds import generator
from safer_tta.attacks import pgd
from safer_tta.models import load_classifier
from tests.serve.helpers import pictures

BATCH = 16


def half_attacked(model: Path, batches: int) -> list[np.ndarray]:
    """Batches of which one half is attacked, by an attacker who has the model itself."""
    second = np.arange(BATCH)[:, None, None, None] % 2 == 1
    return [np.where(second, bad, good) for good, bad in _pairs(model, batches)]


def clean(batches: int, seed: int = 1) -> list[np.ndarray]:
    return pictures(batches, BATCH, seed)


def _pairs(model: Path, batches: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two different batches and their attacked copies, again and again: making them takes seconds."""
    classifier, found = load_classifier(model), []
    for number, images in enumerate(pictures(2, BATCH)):
        with torch.no_grad():
            labels = classifier(torch.from_numpy(images).float() / 255)[1].argmax(dim=1)
        budget = {"eps": 8 / 255, "step": 4 / 255, "steps": 5, "generator": generator(number, "attack")}
        attacked = pgd(classifier, torch.from_numpy(images), labels, **budget)
        found.append((images, (255 * attacked).round().to(torch.uint8).numpy()))
    return [found[number % 2] for number in range(batches)]
