"""Attack a model and compare how Tent adapts on its own, on SAFER and on SAFER-G.

The attacker never sees the deployed model. It trains a surrogate on images like the target's and attacks that; the
perturbations transfer.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import safer_tta
from safer_tta.attacks import pgd
from safer_tta.data import Domain, Stream, StreamSpec, open_dataset
from safer_tta.training import source_recipe, surrogate_recipe, train_source, train_surrogate

TARGET = "photo"
RATES = (0, 50, 100)  # percent of every batch
SETTINGS = {  # a method and a predictor
    "none": ("none", "plain"),
    "Tent": ("tent", "plain"),
    "Tent + SAFER": ("tent", "safer"),
    "Tent + SAFER-G": ("tent", "safer-g"),
}


def attack(surrogate: safer_tta.Classifier, domain: Domain) -> NDArray[np.uint8]:
    """Perturb every image of the domain by at most 8 of 255 levels, with ten steps instead of the paper's twenty."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.from_numpy(domain.images), torch.from_numpy(domain.labels)
    parts = zip(images.split(64), labels.split(64), strict=True)
    attacked = [pgd(surrogate, x, y, eps=8 / 255, step=2 / 255, steps=10, generator=generator) for x, y in parts]
    return (torch.cat(attacked) * 255).round().byte().numpy()


@torch.no_grad()
def fooled(classifier: safer_tta.Classifier, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the percentage of images that the model gets wrong without adaptation."""
    _, logits = classifier(torch.from_numpy(images) / 255)
    return 100 * float((logits.argmax(dim=1) != torch.from_numpy(labels)).float().mean())


def accuracy(method: safer_tta.Method, stream: Stream) -> float:
    right = [method(batch.images).labels == batch.labels for batch in stream]
    return 100 * float(torch.cat(right).float().mean())


def main() -> None:
    dataset = open_dataset("synthetic", count=320)
    domain = dataset.domain(TARGET)
    # Few steps at a high learning rate; `safer demo` trains for longer.
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
    for label, (method, predictor) in SETTINGS.items():
        # Every row sees the same streams, and every cell starts from the source model.
        streams = [Stream([domain], StreamSpec(attack_rate=rate), [attacked]) for rate in RATES]
        figures = [accuracy(safer_tta.adapt(source, method, predictor, seed=0), stream) for stream in streams]
        print(f"{label:20}" + "".join(f"{figure:16.1f}" for figure in figures))


if __name__ == "__main__":
    main()
