"""How good the answers to labelled batches are, in all and separately for clean and attacked images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError
from ..predictors import Prediction, take_images
from .metrics import calibration_error, detection

LABELS = ("labels", "label")  # the keys of the classes in batches that are dicts; Hugging Face's


@dataclass(frozen=True)
class Scores:
    """How good the answers to some images are.

    Attributes:
        images: How many images were answered.
        accuracy: The share of correct answers, in percent.
        ece: The expected calibration error: how far confidence and accuracy lie apart, from 0 to 1.
        suspicion: The mean probability that an image is attacked; None if the predictor does not estimate it.
    """

    images: int
    accuracy: float
    ece: float
    suspicion: float | None


@dataclass(frozen=True, repr=False)
class Evaluation(Scores):
    """How good the answers to a labelled stream are; it prints as a small table.

    Attributes:
        clean: The scores of images that are not attacked; None unless the batches say which images are.
        attacked: The scores of attacked images; None unless there are some.
        detection: The chance that an attacked image has a higher suspicion than a clean one (AUROC); None without both.
    """

    clean: Scores | None = None
    attacked: Scores | None = None
    detection: float | None = None

    def __repr__(self) -> str:
        parts = {"all": self, "clean": self.clean, "attacked": self.attacked}
        lines = [f"{'':10}{'images':>7}{'accuracy, %':>13}{'ECE':>7}{'suspicion':>11}"]
        for name, part in parts.items():
            if part is not None:
                suspicion = "–" if part.suspicion is None else f"{part.suspicion:.2f}"
                lines.append(f"{name:10}{part.images:7}{part.accuracy:13.1f}{part.ece:7.3f}{suspicion:>11}")
        if self.detection is not None:
            lines.append(f"attacked images are told apart by suspicion with an AUROC of {self.detection:.2f}")
        return "\n".join(lines)


def evaluate(adapt: Callable[[Tensor], Prediction], loader: Iterable[Any], *, key: str | None = None) -> Evaluation:
    """Pass labelled batches through a method, a guard or a predictor, and return how good the answers are.

    Args:
        adapt: What answers a batch of images.
        loader: Batches (images, labels), or (images, labels, attacked) with a boolean tensor that says which images
            are attacked. Anything else after the labels is ignored. A dict has the labels under "labels" and what is
            attacked under "attacked".
        key: The key of the images in batches that are dicts. By default it is Hugging Face's, "pixel_values".

    Raises:
        InvalidValueError: If there is no batch, or the labels do not fit the images.
        InvalidTypeError: If a batch has no labels.
    """
    answers = [_answer(adapt, *split(batch, key)) for batch in loader]
    if not answers:
        raise InvalidValueError("the loader gave no batch; expected batches of (images, labels)")
    probs, labels, suspicion = map(torch.cat, zip(*(answer[:3] for answer in answers), strict=True))
    everything = _score(probs, labels, suspicion)
    known = [attacked for *_, attacked in answers if attacked is not None]
    if len(known) < len(answers):
        return Evaluation(**vars(everything))
    attacked = torch.cat(known)
    clean, hit = (_score(probs[part], labels[part], suspicion[part]) for part in (~attacked, attacked))
    return Evaluation(**vars(everything), clean=clean, attacked=hit, detection=detection(suspicion, attacked))


def split(batch: Any, key: str | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return images, labels and, if the batch says so, which images are attacked."""
    images, labels, *more = _parts(batch, key)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != (len(images),):
        came = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InvalidValueError(f"labels are {came}; expected a tensor of {len(images)} whole numbers, one per image")
    if labels.dtype == torch.bool:
        raise InvalidValueError("labels are true or false; expected the numbers of the classes, from 0")
    check_range(labels)
    attacked = more[0] if more and isinstance(more[0], Tensor) and more[0].dtype == torch.bool else None
    return images, labels, attacked


def check_range(labels: Tensor, classes: int | None = None) -> None:
    """Refuse labels that are the number of no class; without `classes` only negative ones."""
    if not len(labels):
        return
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (classes is not None and highest >= classes):
        known = "from 0" if classes is None else f"from 0 to {classes - 1}, as the model has {classes} classes"
        raise InvalidValueError(
            f"labels are from {lowest} to {highest}; expected numbers of classes {known}. Subtract 1 if yours start at "
            "1, and leave out images without a label"
        )


def has_labels(batch: Any) -> bool:
    """Return whether a batch has more than images."""
    if isinstance(batch, Mapping):
        return any(name in batch for name in LABELS)
    return isinstance(batch, (tuple, list)) and len(batch) > 1


def _parts(batch: Any, key: str | None) -> list[Any]:
    """Return images, labels and what else a batch holds, in this order."""
    if isinstance(batch, Mapping):
        if not has_labels(batch):
            raise InvalidTypeError(
                f"a batch has {', '.join(map(repr, batch))} and no 'labels'; expected the classes of the images there"
            )
        labels = next(batch[name] for name in LABELS if name in batch)
        return [take_images(batch, key), labels, batch.get("attacked")]
    if not has_labels(batch):
        came = f"{len(batch)} element(s)" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise InvalidTypeError(f"a batch is {came}; expected (images, labels), as a DataLoader of a dataset gives them")
    return [take_images(batch, key), *batch[1:]]


def _answer(
    adapt: Callable[[Tensor], Prediction], images: Tensor, labels: Tensor, attacked: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what is kept of a batch, on the CPU; suspicion is NaN if the predictor does not estimate it."""
    prediction = adapt(images)
    check_range(labels, prediction.probs.shape[1])
    suspicion = prediction.probs.new_full([len(labels)], torch.nan)
    suspicion = suspicion if prediction.suspicion is None else prediction.suspicion
    return prediction.probs.double().cpu(), labels.cpu(), suspicion.cpu(), None if attacked is None else attacked.cpu()


def _score(probs: Tensor, labels: Tensor, suspicion: Tensor) -> Scores | None:
    if not len(labels):
        return None
    right = (probs.argmax(dim=1) == labels).double()
    mean = None if bool(suspicion.isnan().all()) else float(suspicion.mean())
    return Scores(len(labels), 100 * float(right.mean()), calibration_error(probs, right), mean)
