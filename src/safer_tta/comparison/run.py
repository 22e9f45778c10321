"""Does adapting help here? The model as it is and the model adapted answer the same stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .. import predictors
from .._internal.defaults import METHOD, PREDICTOR
from ..api import adapt
from ..errors import InvalidValueError
from ..evaluation.scores import check_range, has_labels, split
from ..methods import Method
from ..predictors import Plain, Predictor, take_images
from ..views.augment import crop_and_flip, jitter
from .verdict import Comparison, weigh

# Arguments of `adapt` that the model without a method takes too.
SHARED = {"mean", "std", "head", "output", "precision", "compile", "validate"}


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = METHOD,
    predictor: str | Mapping[str, Any] | Predictor = PREDICTOR,
    *,
    seed: int = 0,
    key: str | None = None,
    **options: Any,
) -> Comparison:
    """Return whether adapting helps on a stream, compared with the model as it is. The model is not changed.

    Without labels the verdict is a hint: it follows how often an image and a changed copy of it get the same answer.
    Every image is answered twice in each way.

    Args:
        model: What `safer_tta.adapt` takes.
        batches: Batches of images as they would arrive, of (images, labels), or dicts with images and maybe "labels".
        method: What `adapt` takes.
        predictor: What `adapt` takes.
        seed: Decides all random draws.
        key: The key of the images in batches that are dicts. By default it is Hugging Face's, "pixel_values".
        **options: Further arguments of `adapt`, such as mean, std, norm or the method's own.

    Raises:
        InvalidValueError: If there is no batch, some have labels and others do not, or a label is that of no class.
    """
    shared = {name: options[name] for name in SHARED & options.keys()}
    name, plain = _plain(predictor)
    asked: dict[str, Method] = {"the model as it is": adapt(model, "none", plain, seed=seed, **shared)}
    if name != "plain":
        asked[f"{name}, not learning"] = adapt(model, "none", predictor, seed=seed, **shared)
    asked[f"{method} on {name}"] = adapt(model, method, predictor, seed=seed, **options)
    answers = {one: _Answers() for one in asked}
    truth: list[Tensor | None] = []
    for number, batch in enumerate(batches):
        images, labels = _parse(batch, key)
        truth.append(labels)
        for one, adapted in asked.items():
            answers[one].add(adapted, images, Generator().manual_seed(seed + number))
            if labels is not None:
                check_range(labels, answers[one].probs[-1].shape[1])
    return weigh({one: found.tensors() for one, found in answers.items()}, _whole(truth))


def _plain(predictor: str | Mapping[str, Any] | Predictor) -> tuple[str, str | Predictor]:
    """Return the predictor's name, and what predicts without it but with the same normalisation."""
    if isinstance(predictor, Predictor):
        return type(predictor).__name__.lower(), Plain(predictor.classifier)
    return predictors.parse(predictor)[0], "plain"


class _Answers:
    """The answers of one candidate: probabilities, and labels of changed copies."""

    def __init__(self) -> None:
        self.probs: list[Tensor] = []
        self.again: list[Tensor] = []

    def add(self, adapted: Method, images: Tensor, generator: Generator) -> None:
        self.probs.append(adapted(images).probs.double().cpu())
        copies = _change(adapted.predictor.to_model(images), generator)
        self.again.append(adapted.predict(copies).labels.cpu())

    def tensors(self) -> tuple[Tensor, Tensor]:
        if not self.probs:
            raise InvalidValueError("batches gave no batch; expected batches of images, or of (images, labels)")
        return torch.cat(self.probs), torch.cat(self.again)


def _change(images: Tensor, generator: Generator) -> Tensor:
    """Return copies of images in [0,1] that show the same things; colours change only where there are some."""
    copies = crop_and_flip(images, generator, smallest=0.8)
    if images.shape[1] == 3:
        copies = jitter(copies, generator, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1)
    return copies.clamp(0, 1)


def _parse(batch: Any, key: str | None) -> tuple[Tensor, Tensor | None]:
    """Return the images of a batch, and the labels if there are some."""
    return split(batch, key)[:2] if has_labels(batch) else (take_images(batch, key), None)


def _whole(truth: list[Tensor | None]) -> Tensor | None:
    known = [labels.cpu() for labels in truth if labels is not None]
    if known and len(known) < len(truth):
        raise InvalidValueError(f"{len(known)} of {len(truth)} batches have labels; expected labels in all or in none")
    return torch.cat(known) if known else None
