"""Attack a model and see what adaptation makes of it: Tent alone, behind SAFER, and behind SAFER with the gate.

The attacker never sees the deployed model: it trains a surrogate of its own on images like the target's, and attacks
that. Such perturbations transfer.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import safer_tta
from safer_tta.attacks import pgd
from safer_tta.data import Domain, Stream, StreamSpec, open_dataset
from safer_tta.training import source_recipe, surrogate_recipe, train_source, train_surrogate

TARGET = "photo"
RATES = (0, 50, 100)  # percent of every batch
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none", "safer": False},
    "Tent": {"method": "tent", "safer": False},
    "Tent + SAFER": {"method": "tent", "safer": True},
    "Tent + SAFER, gate": {"method": "tent", "safer": {"mixing": "gate"}},
}


def attack(surrogate: safer_tta.Classifier, domain: Domain) -> NDArray[np.uint8]:
    """Every image of the domain, perturbed by at most 8 of 255 levels: ten steps, where the paper takes twenty."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.from_numpy(domain.images), torch.from_numpy(domain.labels)
    parts = zip(images.split(64), labels.split(64), strict=True)
    attacked = [pgd(surrogate, x, y, eps=8 / 255, step=2 / 255, steps=10, generator=generator) for x, y in parts]
    return (torch.cat(attacked) * 255).round().byte().numpy()


@torch.no_grad()
def fooled(classifier: safer_tta.Classifier, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Percent of images that a model without any adaptation gets wrong."""
    _, logits = classifier(torch.from_numpy(images) / 255)
    return 100 * float((logits.argmax(dim=1) != torch.from_numpy(labels)).float().mean())


def accuracy(method: safer_tta.Method, stream: Stream) -> float:
    right = [method(batch.images).labels == batch.labels for batch in stream]
    return 100 * float(torch.cat(right).float().mean())


def main() -> None:
    dataset = open_dataset("synthetic", count=320)
    domain = dataset.domain(TARGET)
    # Few steps at a high rate; `safer demo` trains for longer.
    with tempfile.TemporaryDirectory() as folder:
        recipe = source_recipe("synthetic", steps=80, batch=16, lr=2e-3)
        source = train_source(dataset, TARGET, recipe, Path(folder) / "source.safetensors")
        recipe = surrogate_recipe("synthetic", steps=40, batch=32, lr=2e-3)
        surrogate = train_surrogate(domain, recipe, Path(folder) / "surrogate.safetensors")

    attacked = attack(surrogate, domain)
    largest = np.abs(attacked.astype(int) - domain.images).max()
    print(f"PGD on the surrogate: no pixel moved by more than {largest} of 255 levels")
    for name, model in (("surrogate", surrogate), ("source model", source)):
        clean, hit = (fooled(model, images, domain.labels) for images in (domain.images, attacked))
        print(f"  {name:12} wrong on {clean:5.1f} % of the images, on {hit:5.1f} % of the attacked ones")

    print(f"\n{f'accuracy on {TARGET}, %':20}" + "".join(f"{rate:>5} % attacked" for rate in RATES))
    for label, setting in SETTINGS.items():
        # The same stream for every row; a new wrapper for every cell, as each starts from the source model.
        streams = [Stream([domain], StreamSpec(attack_rate=rate), [attacked]) for rate in RATES]
        figures = [accuracy(safer_tta.adapt(source, seed=0, **setting), stream) for stream in streams]
        print(f"{label:20}" + "".join(f"{figure:16.1f}" for figure in figures))


if __name__ == "__main__":
    main()
