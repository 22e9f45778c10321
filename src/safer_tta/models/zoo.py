"""Models by name, with weights from a local safetensors file."""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from .._internal import safetensors_io
from ..errors import InvalidValueError, MissingPackageError, UnknownNameError
from . import resnet

log = logging.getLogger("safer_tta")

OWN: dict[str, Callable[..., nn.Module]] = {
    "small": resnet.small,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
}

LIBRARIES = {"timm": ("timm", "create_model"), "torchvision": ("torchvision.models", "get_model")}


def create(
    name: str | os.PathLike[str], *, num_classes: int | None = None, weights: str | os.PathLike[str] | None = None
) -> nn.Module:
    """Build a model by name, with fresh weights or with those of a local safetensors file.

    A name is `small`, `resnet18`, `resnet34`, `resnet50`, `timm:NAME`, `torchvision:NAME`, or the path of a safetensors
    file whose header names the architecture. The head has as many classes as the weights by default, 1000 without
    weights; one of another size keeps its fresh initialisation. `pretrained_cfg` gets `mean` and `std` of the header.
    """
    name = os.fspath(name)
    weights = name if name.endswith(".safetensors") else weights
    tensors, metadata = safetensors_io.read(weights) if weights is not None else ({}, {})
    if name == weights:
        if not metadata.get("architecture"):
            raise InvalidValueError(f"{name} does not name its architecture; use create('resnet50', weights={name!r})")
        name = metadata["architecture"].partition(",")[0].strip()
    build = builder(f"{name},{metadata.get('architecture', '').partition(',')[2]}")
    if num_classes is None:
        num_classes = _classes_in(tensors)
    if num_classes is None and weights is not None:
        raise InvalidValueError(f"{os.fspath(weights)} does not show how many classes it has; give num_classes")
    model = build(num_classes=num_classes or 1000)
    if weights is not None:
        load(model, tensors, origin=os.fspath(weights))
        if "mean" in metadata and "std" in metadata:
            # The attribute has timm's name, so that Classifier looks in one place only.
            shown = {key: tuple(map(float, metadata[key].split(","))) for key in ("mean", "std")}
            model.pretrained_cfg = shown  # type: ignore[assignment]
    return model


def load(model: nn.Module, tensors: Mapping[str, Tensor], *, origin: str, new_head: bool = True) -> None:
    """Copy tensors into a model by name; with `new_head` a head of another size keeps its own."""
    own = model.state_dict()
    head = _head_names(own, tensors) if new_head else set()
    missing = [n for n in own if n not in tensors and not n.endswith("num_batches_tracked")]
    foreign = [n for n in tensors if n not in own]
    misshapen = [n for n in tensors if n in own and own[n].shape != tensors[n].shape and n not in head]
    if missing or foreign or misshapen:
        raise InvalidValueError(
            f"{origin} does not fit this architecture: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(foreign)} unknown {foreign[:3]} and {len(misshapen)} of another shape {misshapen[:3]}; "
            f"expected the weights of a {type(model).__name__} with the same layers"
        )
    if head:
        log.info("%s has a head for another number of classes; the new head is not loaded from it", origin)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in head:
                own[name].copy_(tensor)
    _check_finite(model, tensors)


def _check_finite(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are NaN or infinite. Buffers may be minus infinity, as masks of attention are."""
    for name, own in model.state_dict(keep_vars=True).items():
        if name in tensors and own.is_floating_point():
            wrong = ~own.isfinite() if isinstance(own, nn.Parameter) else own.isnan() | own.isposinf()
            if bool(wrong.any()):
                raise InvalidValueError(
                    f"{name} has {int(wrong.sum())} of {own.numel()} numbers that are NaN or infinite, so its training "
                    "has diverged or the file is damaged. Give weights that are finite"
                )


def check_name(name: str) -> None:
    """Refuse the name of an architecture that does not exist; what is built elsewhere is left to those who build it."""
    if ":" not in name and not name.endswith(".safetensors"):
        builder(name)


def builder(architecture: str) -> Callable[..., nn.Module]:
    """Return the function that builds an architecture; what follows a comma says where a network's strides are."""
    name, _, note = architecture.partition(",")
    library, _, rest = name.partition(":")
    if rest and library in LIBRARIES:
        return functools.partial(_import_builder(library), rest)
    if name not in OWN:
        raise UnknownNameError.of("architecture", name, OWN, advice=", timm:NAME, torchvision:NAME or a file")
    if name == "resnet50" and "first 1x1" in note:
        return functools.partial(resnet.resnet50, stride_on_first=True)
    return OWN[name]


def _import_builder(library: str) -> Callable[..., nn.Module]:
    try:
        module, function = LIBRARIES[library]
        return cast(Callable[..., nn.Module], getattr(importlib.import_module(module), function))
    except ImportError as error:
        raise MissingPackageError(
            f"this model needs {library}: pip install {library} or 'safer-tta[models]'"
        ) from error
    except RuntimeError as error:  # torchvision's compiled operators are of one version and build of torch
        raise MissingPackageError(
            f"{library} cannot be imported ({error}); install the torchvision that belongs to your torch"
        ) from error


def _head_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the last layer's tensors, if its number of classes differs."""
    last = list(own)[-1].rpartition(".")[0]
    names = {f"{last}.weight", f"{last}.bias"}
    changed = any(n in tensors and n in own and tensors[n].shape[:1] != own[n].shape[:1] for n in names)
    return names if changed else set()


def _classes_in(tensors: Mapping[str, Tensor]) -> int | None:
    """Return how many outputs the head has; files list layers in order, so it is the last."""
    named = [name for name in tensors if name.rpartition(".")[0] in ("fc", "head", "head.fc", "classifier")]
    biases = [len(tensors[name]) for name in named if name.endswith("bias")]
    return biases[-1] if biases else None
