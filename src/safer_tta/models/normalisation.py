"""The normalisation that a model was trained with: where models carry it, and how it is declared."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidValueError

Statistics = float | Sequence[float]
OWN = (("mean", "std"), ("pixel_mean", "pixel_std"))  # what layers that normalise call their numbers
AS_THEY_ARE = "its training, on images in [0,1] as they are"
FEW = 16  # channels; images rarely have more
HF_FILES = ("preprocessor_config.json", "processor_config.json")


class Found(NamedTuple):
    """What a model says about its normalisation."""

    mean: Statistics
    std: Statistics
    where: str
    layer: str = ""  # the name of the layer that carries it; empty for the model itself


class Choice(NamedTuple):
    """The normalisation that is used."""

    said_by: str  # where it comes from, in words; empty if nothing declares it
    statistics: tuple[Tensor, Tensor] | None = None  # mean and std (C,1,1); None: images stay as they are
    layer: str = ""  # the name of the layer that carries it, if it was taken from one


def channels_of(model: nn.Module) -> frozenset[int]:
    """Return how many channels images may have; empty if the model does not show it.

    The convolution that sees the images is nearly always the first one. If that takes many channels, it may be another
    layer that a wrapper registers first; then it may also be the one that takes the fewest.
    """
    declared = getattr(getattr(model, "config", None), "num_channels", None)
    if isinstance(declared, int):
        return frozenset([declared])
    counts = [module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    return frozenset([counts[0]] if counts[0] <= FEW else [counts[0], min(counts)]) if counts else frozenset()


def choose(model: nn.Module, mean: Statistics | None, std: Statistics | None, channels: frozenset[int]) -> Choice:
    """Return the normalisation that is given, or else the one that the model carries.

    What a model carries is not taken if a layer of it normalises already, or if it is for other channels.
    """
    if (mean is None) != (std is None):
        raise InvalidValueError("only one of mean and std was given; give both or neither")
    if mean is not None and std is not None:
        return Choice("what was given", as_tensors(model, mean, std, channels))
    own = own_layer(model)
    if own is not None:
        return Choice(f"layer {own!r} of the model" if own else "the model itself")
    found = search(model)
    if found is None or (channels and torch.as_tensor(found.mean).numel() not in {1, *channels}):
        return Choice("")
    said_by = found.where + (f" of layer {found.layer!r}" if found.layer else "")
    return Choice(said_by, as_tensors(model, found.mean, found.std, channels), found.layer)


def search(model: nn.Module) -> Found | None:
    """Return the normalisation that a model or a layer of it carries, the outermost first."""
    for name, module in model.named_modules():
        for source in (_from_timm, _from_open_clip, _from_torchvision, _from_hugging_face):
            found = source(module)
            if found is not None:
                return found._replace(layer=name)
    return None


def own_layer(model: nn.Module) -> str | None:
    """Return the name of a layer that seems to normalise images inside the model: it has a mean and a std."""
    name: str
    for name, module in model.named_modules():
        numbers = ((getattr(module, part, None) for part in pair) for pair in OWN)
        if any(all(value is not None and not callable(value) for value in pair) for pair in numbers):
            return name
    return None


def check_unchanged(images: Tensor, received: Iterable[Any], said_by: str) -> None:
    """Refuse a normalisation taken from a layer that does not receive the images as they enter the model."""
    same_shape = [r for r in received if isinstance(r, Tensor) and r.shape == images.shape]
    if any(not torch.equal(each, images) for each in same_shape):
        raise InvalidValueError(
            f"the normalisation was taken from {said_by}, and the model changes the images before that layer. If it "
            "normalises them there: adapt(model, mean=0, std=1). If not, give both: adapt(model, mean=..., std=...)"
        )


def as_tensors(model: nn.Module, mean: Statistics, std: Statistics, channels: frozenset[int]) -> tuple[Tensor, Tensor]:
    """Return mean and std (C,1,1) of as many channels as the model takes; values that cannot work are refused."""
    shift, scale = (torch.as_tensor(s, dtype=torch.float32).reshape(-1, 1, 1) for s in (mean, std))
    counts = {len(shift), len(scale)} - {1}
    if len(counts) > 1 or (channels and counts - channels):
        takes = " or ".join(map(str, sorted(channels))) or "some number of"
        raise InvalidValueError(
            f"mean is {mean} and std is {std}; expected one number, or one for each of {takes} channels"
        )
    count = min(counts or (channels if len(channels) == 1 else {1}))
    shift, scale = shift.expand(count, 1, 1), scale.expand(count, 1, 1)
    if not bool((scale > 0).all()):
        raise InvalidValueError(f"std is {std}; expected positive numbers")
    if bool((scale > 2).any()) or bool((shift.abs() > 2).any()):
        raise InvalidValueError(
            f"mean is {mean} and std is {std}, as for pixels of 0..255; expected them for pixels in [0,1]. "
            "Divide both by 255"
        )
    reference = next(model.parameters(), torch.empty(0))
    return shift.to(reference, copy=True), scale.to(reference, copy=True)


def _from_timm(module: nn.Module) -> Found | None:
    """Read `pretrained_cfg`, which timm's models carry and this library's zoo sets."""
    config = getattr(module, "pretrained_cfg", None)
    return _read(config, "mean", "std", "its pretrained_cfg") if isinstance(config, Mapping) else None


def _from_open_clip(module: nn.Module) -> Found | None:
    mean, std = getattr(module, "image_mean", None), getattr(module, "image_std", None)
    return Found(mean, std, "its image_mean and image_std") if mean is not None and std is not None else None


def _from_torchvision(module: nn.Module) -> Found | None:
    """Read the transforms of weights that somebody has put on the model: `model.weights = Weights.DEFAULT`."""
    make: Callable[[], Any] | None = getattr(getattr(module, "weights", None), "transforms", None)
    used = make() if callable(make) else None
    mean, std = getattr(used, "mean", None), getattr(used, "std", None)
    return Found(mean, std, "the transforms of its weights") if mean is not None and std is not None else None


def _from_hugging_face(module: nn.Module) -> Found | None:
    """Read the configuration of the image processor in the local folder that a model was loaded from."""
    folder = Path(str(getattr(getattr(module, "config", None), "_name_or_path", "") or "no folder"))
    found = (_of_processor(config, str(file)) for file, config in read_processors(folder))
    return next(filter(None, found), None)


def read_processors(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the files of a Hugging Face folder that describe its image processor, with what they say of it."""
    for file in (folder / name for name in HF_FILES):
        if file.is_file():
            try:
                config = json.loads(file.read_text())
            except ValueError as error:
                raise InvalidValueError(
                    f"{file} is not valid JSON ({error}); repair it or give mean and std"
                ) from error
            yield file, config.get("image_processor", config)


def _of_processor(config: Mapping[str, Any], where: str) -> Found | None:
    """Return the normalisation of a processor, for pixels in [0,1] whatever it rescales them to.

    None if the file does not say it all: without `do_normalize` it depends on the kind of processor, EfficientNet's
    `include_top` divides by std a second time, and channels in another order are more than a normalisation.
    """
    top = "EfficientNet" in _kind(config) and config.get("include_top", True)
    if "do_normalize" not in config or config.get("do_flip_channel_order") or top:
        return None
    scale = 255 * float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 255.0
    offset = 1.0 if config.get("rescale_offset", False) else 0.0
    mean, std = [0.0], [1.0]
    if config["do_normalize"]:
        declared = _read(config, "image_mean", "image_std", where)
        if declared is None:
            return None
        mean, std = (torch.as_tensor(s).reshape(-1).tolist() for s in declared[:2])
    return Found([(m + offset) / scale for m in mean], [s / scale for s in std], where)


def _kind(config: Mapping[str, Any]) -> str:
    """Return the name of a processor's class."""
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")


def _read(config: Mapping[str, Any], mean: str, std: str, where: str) -> Found | None:
    return Found(config[mean], config[std], where) if config.get(mean) and config.get(std) else None


def advice(model: nn.Module) -> Iterator[str]:
    """Yield what to do about a model that declares nothing."""
    yield "If it was trained on normalised images: adapt(model, mean=..., std=...)"
    if hasattr(model, "config"):
        yield "Hugging Face keeps both in the image processor, as image_mean and image_std"
    yield "If it was trained on images in [0,1] as they are, or normalises them itself: adapt(model, mean=0, std=1)"
