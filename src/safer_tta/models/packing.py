"""A classifier and all that it takes to run it in one safetensors file, which holds numbers and words but no code."""

import copy
import logging
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._internal import safetensors_io, user_code
from ..errors import InvalidTypeError, InvalidValueError, SaferError
from . import building, normalisation, zoo
from . import head as heads
from .card import Card, FilePath, check_kind
from .classifier import Classifier
from .recognising import complete

log = logging.getLogger("safer_tta")


def load_classifier(path: FilePath, *, code: FilePath | None = None) -> Classifier:
    """Load a classifier that `Classifier.save`, `safer pack` or `safer train` wrote, in eval mode.

    Args:
        path: The file.
        code: Your own Python file that defines the network, if it was packed from one. It is run, so name only a file
            that you trust. Without it a model's file never runs any code.

    Returns:
        The classifier. Its `card` says the names of its classes and the side of its images.

    Raises:
        InvalidValueError: If it is another kind of file, or needs code that you have not named.
        TensorFileError: If it is damaged.
        MissingPackageError: If timm, torchvision or transformers builds the network and is not installed.
    """
    if code is not None:
        user_code.load(os.fspath(code))
    return load(path)


def load(path: FilePath, *, classes: int | None = None) -> Classifier:
    """Load a classifier; if it has another number of classes, its head is a new one."""
    check_kind(path)
    tensors, metadata = safetensors_io.read(path)
    card = Card.of(path, metadata)
    try:
        classifier = unpack(card, tensors)
    except InvalidValueError as error:
        raise InvalidValueError(f"{path}: {error}") from error
    if building.code_of(card.architecture) != card.code:
        file = card.architecture.partition(":")[0]
        log.warning("%s.py is not the file that it was when %s was packed; check that it builds the same", file, path)
    if classes is not None:
        _fit_head(classifier, classes)
    return classifier


def unpack(card: Card, tensors: Mapping[str, Tensor]) -> Classifier:
    """Return the classifier of a card with these weights."""
    model = building.build(card.architecture, card.arguments)
    # None would take the normalisation that timm knows for the name, and not that of this model.
    ignored = card.mean is None and normalisation.search(model) is not None
    mean, std = (0.0, 1.0) if ignored else (card.mean, card.std)
    classifier = Classifier(model, head=card.head, output=card.output, mean=mean, std=std)
    from_file = card.mean is not None or ignored
    classifier.normalised_by = "its file" if from_file else classifier.normalised_by or normalisation.AS_THEY_ARE
    _fit_head(classifier, len(card.classes))
    _match_types(model, tensors)
    if classifier.mean is not None and classifier.std is not None:
        classifier.mean, classifier.std = (s.to(classifier.dtype) for s in (classifier.mean, classifier.std))
    zoo.load(model, tensors, origin="the file", new_head=False)
    classifier.card = card
    return classifier.eval()


def save(
    classifier: Classifier,
    path: FilePath,
    *,
    architecture: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    side: int | None = None,
    resize: str | None = None,
) -> Card:
    """Write a classifier to a file, after a check that it will give the same answers: `Classifier.save`."""
    asked = {"architecture": architecture, "arguments": arguments, "classes": classes, "side": side, "resize": resize}
    card = complete(classifier, {name: value for name, value in asked.items() if value is not None})
    _check_same(classifier, card)
    write(classifier, path, card)
    return card


def write(classifier: Classifier, path: FilePath, card: Card, more: Mapping[str, str] | None = None) -> None:
    """Write a classifier with its card and more text about it."""
    safetensors_io.write(path, _tensors(classifier.model), {**card.metadata(), **(more or {})})


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found = model.state_dict()
    other = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if other:
        raise InvalidTypeError(
            f"{other[0]} is a {type(found[other[0]]).__name__} in the model's state; a file holds only tensors. Store "
            "it as a buffer"
        )
    return dict(found)


def _check_same(classifier: Classifier, card: Card) -> None:
    """Refuse a card from which another network would be built."""
    if len(card.classes) != classifier.num_classes:
        raise InvalidValueError(
            f"{len(card.classes)} class names were given for a model with {classifier.num_classes} classes; give one "
            "for each"
        )
    original = copy.deepcopy(classifier).cpu().eval()
    original.accelerate(precision="float32", compile=False)
    original.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    again = unpack(card, _tensors(original.model))
    channels = min(original.channels, default=3)
    images = torch.rand(2, channels, card.side, card.side, generator=torch.Generator().manual_seed(0))
    if not torch.equal(*(_scores(each, images.to(original.dtype)) for each in (original, again))):
        given = textwrap.shorten(str(dict(card.arguments)), 200)
        raise InvalidValueError(
            f"{card.architecture} with {given} builds a network that gives other answers than the model. Give "
            "architecture and arguments with which it was built; if it was changed afterwards, do that in a function "
            "of your own file: architecture='my_models.py:make'"
        )


@torch.no_grad()
def _scores(classifier: Classifier, images: Tensor) -> Tensor:
    """Return the scores of images, or say that the model does not take images of this size."""
    try:
        scores: Tensor = classifier(images)[1]
    except SaferError:
        raise
    except Exception as error:  # of the network, in its own words
        problem = f"the model fails on images of {tuple(images.shape[2:])} pixels ({type(error).__name__}: {error})"
        raise InvalidValueError(f"{problem}. Give the side of the images that it takes") from error
    return scores


def _fit_head(classifier: Classifier, classes: int) -> None:
    """Give a classifier with another number of classes a new head, as a model has that was trained on for others."""
    if classifier.num_classes == classes:
        return
    for name in classifier.head_name.split(heads.JOIN):
        classifier.model.set_submodule(name, _resized(classifier.model.get_submodule(name), name, classes))


def _resized(layer: nn.Module, name: str, classes: int) -> nn.Module:
    """Return a new layer like one of a head, for another number of classes."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes, bias=layer.bias is not None)
    if isinstance(layer, nn.Conv2d):
        return nn.Conv2d(layer.in_channels, classes, 1, bias=layer.bias is not None)
    raise InvalidValueError(
        f"head {name!r} is a {type(layer).__name__} of another number of classes; expected {classes}. Give the "
        "arguments that build it for those"
    )


def _match_types(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give parameters the types of these tensors, such as bfloat16; a copy would convert the numbers."""
    for name, own in model.state_dict(keep_vars=True).items():
        if name in tensors and tensors[name].is_floating_point() != own.is_floating_point():
            raise InvalidValueError(
                f"{name} has numbers of {tensors[name].dtype}; expected such as {own.dtype}. Pack the weights as they "
                "are in training"
            )
        if name in tensors and tensors[name].dtype != own.dtype:
            own.data = own.data.to(tensors[name].dtype)
