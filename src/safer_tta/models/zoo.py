"""Models by name: our own residual networks, `timm:NAME`, `torchvision:NAME`; weights from a local safetensors file."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .. import tensorfile
from . import resnet

log = logging.getLogger("safer_tta")

OWN: dict[str, Callable[..., nn.Module]] = {
    "small": resnet.small,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
}


def create(
    name: str | os.PathLike[str], *, num_classes: int | None = None, weights: str | os.PathLike[str] | None = None
) -> nn.Module:
    """Build a model.

    name: `small`, `resnet18`, `resnet34`, `resnet50`, `timm:NAME` (extra `[models]`), `torchvision:NAME`, or the path
        of a safetensors file whose header names the architecture.
    num_classes: default: as many as the weights have, else 1000.
    weights: a local safetensors file. A head of another size is left at its fresh initialisation.
        `mean` and `std` in the file's header come along as `model.pretrained_cfg`.
    """
    name = os.fspath(name)
    if name.endswith(".safetensors"):
        name, weights = _architecture(name), name
    tensors, metadata = tensorfile.read(weights) if weights is not None else ({}, {})
    build = _builder(name, metadata)
    if num_classes is None:
        num_classes = _classes_in(tensors)
    if num_classes is None and weights is not None:
        raise ValueError(f"{os.fspath(weights)} does not show how many classes it has; give num_classes")
    model = build(num_classes=num_classes or 1000)
    if weights is not None:
        load(model, tensors, origin=os.fspath(weights))
        if "mean" in metadata and "std" in metadata:
            # timm's name for it, so that Classifier has one place to look
            model.pretrained_cfg = {key: _floats(metadata[key]) for key in ("mean", "std")}  # type: ignore[assignment]
    return model


def load(model: nn.Module, tensors: Mapping[str, Tensor], *, origin: str) -> None:
    """Copy tensors into a model by name. Only a head of another size may be missing."""
    own = model.state_dict()
    head = _head_names(own, tensors)
    missing = [n for n in own if n not in tensors and not n.endswith("num_batches_tracked")]
    foreign = [n for n in tensors if n not in own]
    misshapen = [n for n in tensors if n in own and own[n].shape != tensors[n].shape and n not in head]
    if missing or foreign or misshapen:
        raise ValueError(
            f"{origin} does not fit this architecture: "
            f"{len(missing)} tensors missing {missing[:3]}, {len(foreign)} unknown {foreign[:3]}, "
            f"{len(misshapen)} of another shape {misshapen[:3]}. Expected the weights of a {type(model).__name__} "
            "with the same layers"
        )
    if head:
        log.info("%s: its head has another number of classes; ours starts fresh", origin)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in head:
                own[name].copy_(tensor)


def _builder(name: str, metadata: Mapping[str, str]) -> Callable[..., nn.Module]:
    library, _, rest = name.partition(":")
    if rest and library == "timm":
        return functools.partial(_import("timm", "models").create_model, rest)
    if rest and library == "torchvision":
        return functools.partial(_import("torchvision.models", "models").get_model, rest)
    if name not in OWN:
        raise ValueError(f"model {name!r} is unknown; expected {', '.join(OWN)}, timm:NAME, torchvision:NAME or a file")
    if name == "resnet50" and "first 1x1" in metadata.get("architecture", ""):
        return functools.partial(resnet.resnet50, stride_on_first=True)
    return OWN[name]


def _import(module: str, extra: str):  # type: ignore[no-untyped-def]
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"this model needs {package}: pip install {package} or 'safer-tta[{extra}]'") from error


def _architecture(path: str) -> str:
    """The first word of the header's `architecture`."""
    named = tensorfile.read_metadata(path).get("architecture")
    if not named:
        raise ValueError(f"{path} does not say its architecture; give it: create('resnet50', weights={path!r})")
    return named.partition(",")[0].strip()


def _head_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> set[str]:
    """The tensors of the last layer, if its number of classes differs."""
    last = list(own)[-1].rpartition(".")[0]
    names = {f"{last}.weight", f"{last}.bias"}
    changed = any(n in tensors and n in own and tensors[n].shape[:1] != own[n].shape[:1] for n in names)
    return names if changed else set()


def _classes_in(tensors: Mapping[str, Tensor]) -> int | None:
    """As many as the last layer with a bias has outputs: files list layers in order, ours and everybody's."""
    named = [name for name in tensors if name.rpartition(".")[0] in ("fc", "head", "head.fc", "classifier")]
    biases = [len(tensors[name]) for name in named if name.endswith("bias")]
    return biases[-1] if biases else None


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
