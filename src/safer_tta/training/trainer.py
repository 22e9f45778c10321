"""The training loop of source models and surrogates: it can be resumed, and keeps the best model on validation.

The randomness of step k depends only on (seed, k), so a killed training resumes from its last checkpoint and ends
with the same result.
"""

import copy
import dataclasses
import json
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .._internal import checks, optimizers, safetensors_io
from .._internal.progress import Tick, silent
from .._internal.resizing import STRETCH
from .._internal.seeds import draw_seed, generator
from ..attacks import pgd
from ..data import Domain
from ..data.store import digest_file
from ..errors import InvalidValueError
from ..models import Classifier, load_classifier, packing, recognising, zoo
from ..models.card import Card, find_card, read_card
from ..models.normalisation import AS_THEY_ARE
from ..views.augment import crop_and_flip, jitter, sometimes_grey

SAVING = 0.05  # the share of time for checkpoints, which are four times the size of the model with Adam's moments


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. The defaults are the paper's."""

    architecture: str = "resnet18"  # a name for `models.zoo.create`, or that of the packed model in weights
    weights: str | None = None  # the safetensors file that training starts from; None trains from scratch
    steps: int = 5000  # batches
    batch: int = 32  # images per domain in a batch
    lr: float = 5e-5  # falls to a tenth at 70 % and again at 90 % of the steps
    every: int = 100  # steps between two validations
    seed: int = 0  # decides everything random
    attack: dict[str, Any] | None = None  # options of `pgd`, if training sees attacked images (Robust ERM)

    def __post_init__(self) -> None:
        checks.count(steps=self.steps, batch=self.batch, every=self.every)
        checks.positive(lr=self.lr)


def split(labels: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of 80 % and of 20 % of every class."""
    training, validation = [], []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        order = torch.randperm(len(places), generator=generator("split", seed, int(label))).numpy()
        edge = round(0.8 * len(places))
        training.append(places[order[:edge]])
        validation.append(places[order[edge:]])
    return np.sort(np.concatenate(training)), np.sort(np.concatenate(validation))


def train(
    domains: Sequence[Domain],
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    compile: bool = False,
    tick: Tick = silent,
) -> Classifier:
    """Train on 80 % of the domains, keep the best model on the other 20 % and write it to a file; or load that file.

    `compile` compiles the training passes, which takes a minute and pays for long trainings on a GPU.
    """
    path = Path(path)
    if path.exists():
        _check_same(path, describe(domains, recipe))
        return load_classifier(path).to(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _Training(domains, recipe, path, device, compile).run(tick)


def describe(domains: Sequence[Domain], recipe: Recipe) -> dict[str, Any]:
    """Return what defines a training on every machine: weights by their content, not by their path."""
    settings = dataclasses.asdict(recipe)
    settings["weights"] = None if recipe.weights is None else digest_file(recipe.weights)
    classes = list(domains[0].classes) if domains else []
    return {"recipe": settings, "domains": {d.name: d.content for d in domains}, "classes": classes}


def _check_same(path: Path, asked: dict[str, Any]) -> None:
    found, asked = recipe_of(path), json.loads(json.dumps(asked))
    differing = [key for key in asked["recipe"] if found.get("recipe", {}).get(key) != asked["recipe"][key]]
    differing += [key for key in ("domains", "classes") if found.get(key) != asked[key]]
    if differing:
        problem = f"{path} holds a model of another training ({', '.join(differing)} differ)"
        raise InvalidValueError(f"{problem}. Remove it or write to another file")


def recipe_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a model was trained from: recipe, domains, classes, accuracy; of a packed one, nothing."""
    metadata = safetensors_io.read_metadata(path)
    Card.of(path, metadata)
    return dict(json.loads(metadata.get("recipe", "{}")))


def check_classes(path: str | os.PathLike[str], domain: Domain) -> None:
    """Refuse a domain whose classes are not those of a model, in this order."""
    known = read_card(path).classes
    if list(known) != list(domain.classes):
        raise InvalidValueError(
            f"{path} knows the classes {', '.join(known)} and {domain.dataset} has {', '.join(domain.classes)}; "
            "expected a model that was trained on this data"
        )


def warn_if_seen(path: str | os.PathLike[str], domains: Iterable[Domain]) -> None:
    """Warn of domains that a model was trained on: accuracy on them says nothing about a new domain."""
    trained_on = recipe_of(path).get("domains", {})
    for domain in domains:
        if domain.name in trained_on:
            warnings.warn(
                f"{path} was trained on {', '.join(map(repr, sorted(trained_on)))}, and the images to adapt to are of "
                f"{domain.name!r}. The accuracy does not say how well it does on a new domain; take another target, or "
                f"a model that was trained without {domain.name!r}",
                stacklevel=3,
            )


@torch.no_grad()
def accuracy(model: Classifier, images: Tensor | NDArray[np.uint8], labels: Tensor | NDArray[np.int64]) -> float:
    """Return the percentage of images (N,3,H,W), bytes, that a model in eval mode classifies correctly."""
    right = 0
    for first in range(0, len(labels), 256):
        part = slice(first, first + 256)
        pictures = torch.as_tensor(np.array(images[part]) if isinstance(images, np.ndarray) else images[part])
        _, logits = model(pictures.to(model.device).float() / 255)
        right += int((logits.argmax(dim=1).cpu() == torch.as_tensor(labels[part])).sum())
    return 100 * right / max(1, len(labels))


def augment(images: Tensor, randomness: torch.Generator) -> Tensor:
    """Return images (B,3,H,W) in [0,1] as training sees them: cropped, flipped, with other colours, one in ten grey."""
    images = crop_and_flip(images, randomness, smallest=0.7)
    images = jitter(images, randomness, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3)
    return sometimes_grey(images, randomness, chance=0.1)


def start(recipe: Recipe, classes: Sequence[str]) -> Classifier:
    """Return the model that a training starts from; a packed network gets a new head if its classes are others."""
    card = None if recipe.weights is None else find_card(recipe.weights)
    if card is not None and card.architecture == recipe.architecture and recipe.architecture not in zoo.OWN:
        return packing.load(str(recipe.weights), classes=len(classes))
    model = Classifier(zoo.create(recipe.architecture, num_classes=len(classes), weights=recipe.weights))
    model.normalised_by = model.normalised_by or AS_THEY_ARE
    return model


class _Training:
    def __init__(self, domains: Sequence[Domain], recipe: Recipe, path: Path, device: str, compile: bool) -> None:
        if not domains:
            raise InvalidValueError("domains is empty; expected at least one domain to train on")
        self.recipe, self.path, self.device = recipe, path, torch.device(device)
        self.classes, self.side = domains[0].classes, domains[0].images.shape[-1]
        origins = {domain.origin for domain in domains}
        self.origin = origins.pop() if len(origins) == 1 else ""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)  # a fresh head is drawn from torch's own generator
            self.model = start(recipe, self.classes)
        cuda = self.device.type == "cuda"
        precision = "bfloat16" if cuda else "float32"
        self.model.to(self.device).accelerate(precision=precision)
        # The same parameters, compiled for the one shape of training; validation has other shapes.
        self.trained = copy.copy(self.model)
        self.trained.accelerate(compile=compile)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=recipe.lr, fused=cuda)
        parts = [split(d.labels, recipe.seed) for d in domains]
        self.training = [self._take(d, part[0]) for d, part in zip(domains, parts, strict=True)]
        self.validation = [self._take(d, part[1]) for d, part in zip(domains, parts, strict=True)]
        self.definition = describe(domains, recipe)
        self.best: dict[str, Tensor] = {}
        self.accuracy = -1.0

    def run(self, tick: Tick) -> Classifier:
        self.save_again = time.monotonic()
        for step in range(self._resume(), self.recipe.steps):
            loss = self._step(step)
            done = step + 1
            if done % self.recipe.every == 0 or done == self.recipe.steps:
                self._keep_best()
                self._checkpoint(done)
            if done % 10 == 0 or done == self.recipe.steps:
                looked = {"accuracy": 100 * self.accuracy} if self.best else {}
                tick(done, self.recipe.steps, loss=loss.item(), **looked)
        self.model.model.load_state_dict(self.best)
        self._write()
        self._progress.unlink(missing_ok=True)
        return self.model.eval()

    def _step(self, step: int) -> Tensor:
        randomness = generator(self.recipe.seed, "train", step)
        chosen = [torch.randint(len(y), (self.recipe.batch,), generator=randomness) for _, y in self.training]
        images = torch.cat([x[i.to(x.device)] for (x, _), i in zip(self.training, chosen, strict=True)])
        labels = torch.cat([y[i.to(y.device)] for (_, y), i in zip(self.training, chosen, strict=True)])
        images, labels = images.to(self.device), labels.to(self.device)
        images = augment(images.float() / 255, randomness)
        cuda = self.device.type == "cuda"
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        # Drop-out draws from torch's own generator, which must also follow from the seed and the step.
        with torch.random.fork_rng([self.device] if cuda else []):
            torch.manual_seed(draw_seed(randomness))
            if self.recipe.attack is not None:  # not compiled: that would compute gradients of the weights too
                images = pgd(self.model, images, labels, generator=randomness, **self.recipe.attack)
            return self._learn(images, labels)

    def _learn(self, images: Tensor, labels: Tensor) -> Tensor:
        self.trained.train()
        with self.trained.tuned():
            _, logits = self.trained(images)
            loss = F.cross_entropy(logits, labels)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def _learning_rate(self, step: int) -> float:
        passed = sum(step >= share * self.recipe.steps for share in (0.7, 0.9))
        return float(self.recipe.lr * 0.1**passed)

    def _keep_best(self) -> None:
        accuracy = self._validate()
        if accuracy >= self.accuracy:  # of two equals the later one has seen more images
            self.accuracy = accuracy
            self.best = {n: t.detach().clone() for n, t in self.model.model.state_dict().items()}

    def _validate(self) -> float:
        self.model.eval()
        right = [accuracy(self.model, images, labels) / 100 * len(labels) for images, labels in self.validation]
        return sum(right) / max(1, sum(len(labels) for _, labels in self.validation))

    # --- on disk ----------------------------------------------------------------------------------------------------

    @property
    def _progress(self) -> Path:
        return self.path.with_name(self.path.name + ".progress")

    def _checkpoint(self, step: int) -> None:
        """Write everything to resume from, unless checkpoints have taken their share of the time already."""
        started = time.monotonic()
        if started < self.save_again:
            return
        tensors = {f"model.{n}": t for n, t in self.model.model.state_dict().items()}
        tensors |= {f"best.{n}": t for n, t in self.best.items()}
        tensors |= {f"adam.{n}": t for n, t in optimizers.tensors_of(self.optimizer).items()}
        position = {"step": step, "accuracy": self.accuracy, **self.definition}
        safetensors_io.write(self._progress, tensors, {"position": json.dumps(position)})
        self.save_again = started + (time.monotonic() - started) / SAVING

    def _resume(self) -> int:
        """Return the step to resume from: 0, or that of the last checkpoint of this training."""
        if not self._progress.exists():
            return 0
        tensors, metadata = safetensors_io.read(self._progress)
        position = json.loads(metadata.get("position", "{}"))
        asked = json.loads(json.dumps(self.definition))
        if {key: position.get(key) for key in asked} != asked:
            raise InvalidValueError(f"{self._progress} belongs to another training; remove it or choose another name")
        self.model.model.load_state_dict({n[6:]: t for n, t in tensors.items() if n.startswith("model.")})
        self.best = {n[5:]: t.to(self.device) for n, t in tensors.items() if n.startswith("best.")}
        moments = {n[5:]: t for n, t in tensors.items() if n.startswith("adam.")}
        optimizers.load(self.optimizer, moments)
        self.accuracy = position["accuracy"]
        return int(position["step"])

    def _write(self) -> None:
        facts = {"accuracy": self.accuracy, "side": self.side, "origin": self.origin}
        more = {"recipe": json.dumps({**self.definition, **facts}, sort_keys=True)}
        zoos = {"architecture": _architecture(self.recipe, self.model), "arguments": {"num_classes": len(self.classes)}}
        built = {} if self.model.card is not None else zoos
        # The images of a dataset were stretched to their side.
        made = {"classes": self.classes, "side": self.side, "resize": str(STRETCH)}
        packing.write(self.model, self.path, recognising.complete(self.model, {**built, **made}), more)

    def _take(self, domain: Domain, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(np.ascontiguousarray(domain.images[places]))
        return images.to(self.device), torch.from_numpy(domain.labels[places])


def _architecture(recipe: Recipe, model: Classifier) -> str:
    """Return the zoo's name, and where the stride is if torchvision has it elsewhere."""
    first = getattr(model.model, "layer2", [None])[0]
    strided = getattr(getattr(first, "conv3", None), "stride", None) and first.conv1.stride == (2, 2)
    return f"{recipe.architecture}, stride 2 on the first 1x1 convolution" if strided else recipe.architecture
