"""What a model's file has to say of a model, as far as the model shows it itself."""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._internal import user_code
from .._internal.resizing import FILTERS, Resize
from ..errors import InvalidTypeError, InvalidValueError
from . import building
from .card import Card
from .classifier import Classifier

log = logging.getLogger("safer_tta")

Found = dict[str, Any]
SHOWN = ("architecture", "arguments", "classes", "side", "resize")  # by the card of a model that was loaded


def complete(classifier: Classifier, given: Mapping[str, Any]) -> Card:
    """Return the card of a classifier: what was given, and what the model shows of the rest.

    Raises:
        InvalidValueError: If the architecture or the side of the images is neither given nor shown.
    """
    found: Found = {**recognise(classifier), **given}
    if "architecture" not in found:
        raise InvalidValueError(
            f"a {type(classifier.model).__name__} does not show how it was built. Give architecture='timm:NAME', "
            "'torchvision:NAME', a name of the zoo such as 'small', or 'my_models.py:make' for a function of your own "
            "file, with its arguments"
        )
    found |= resolve(found["architecture"])
    if found.get("side") is None:
        raise InvalidValueError("the model does not show the size of its images. Give side, in pixels")
    classes = found.get("classes") or map(str, range(classifier.num_classes))
    shift, scale = classifier.mean, classifier.std
    if shift is not None and scale is not None:
        found |= {"mean": _numbers(shift), "std": _numbers(scale)}
    if callable(classifier.output):
        raise InvalidTypeError(
            "output is a function, and a model's file holds no code. Give a key or an index, or call the function in "
            "the model: architecture='my_models.py:make'"
        )
    found |= {"code": building.code_of(found["architecture"]), "output": classifier.output}
    return Card(**{**found, "classes": tuple(map(str, classes)), "head": classifier.head_name})


def _numbers(tensor: Tensor) -> tuple[float, ...]:
    """Return the shortest numbers that are these again in float32: 0.485 and not 0.48500001430511475."""
    return tuple(float(str(number)) for number in tensor.detach().flatten().float().cpu().numpy())


def resolve(architecture: str) -> Found:
    """Return an architecture as a card names it; a function of the user's own file is loaded with that file."""
    file, _, name = architecture.rpartition(":")
    if not file.endswith(".py"):
        return {"architecture": architecture}
    if not building.is_own_code(f"{Path(file).stem}:{name}"):
        raise InvalidValueError(
            f"{architecture} would be taken for a network of {Path(file).stem}; expected FILE.py:FUNCTION of a file "
            "with another name. Rename it"
        )
    user_code.load(file)
    return {"architecture": f"{Path(file).stem}:{name}"}


def recognise(classifier: Classifier) -> Found:
    """Return what is known of a model that was loaded from a file, or that timm or transformers built."""
    model = classifier.model
    if classifier.card is not None:
        return {name: getattr(classifier.card, name) for name in SHOWN}
    config: Any = getattr(model, "config", None)
    shown: Any = getattr(model, "pretrained_cfg", None)
    if hasattr(config, "model_type"):
        return from_config(type(model).__name__, json.loads(config.to_json_string()))
    if shown and "architecture" in shown:
        arguments = {"num_classes": classifier.num_classes}
        return {"architecture": f"timm:{shown['architecture']}", "arguments": arguments, **from_timm(model, arguments)}
    return {}


def from_config(name: str, config: Mapping[str, Any]) -> Found:
    """Return what the configuration of a Hugging Face model says."""
    kept = building.shaping(config) | {"architectures": [name]}
    found: Found = {"architecture": f"{building.HUGGING_FACE}:{name}", "arguments": {"config": kept}}
    labels = [label for _, label in sorted((int(n), str(text)) for n, text in kept.get("id2label", {}).items())]
    if labels and not all(label == f"LABEL_{n}" for n, label in enumerate(labels)):
        found["classes"] = _distinct(labels)
    side = kept.get("image_size")
    if side:
        found["side"] = int(side if isinstance(side, int) else side[0])
    return found


def _distinct(labels: list[str]) -> list[str]:
    """Add its number to every name that several classes have, such as ImageNet's two cranes."""
    counts = Counter(labels)
    double = [name for name, count in counts.items() if count > 1]
    if double:
        example = f"{double[0]} ({labels.index(double[0])})"
        log.warning("%d of the model's class names are not unique; they get their number: %s", len(double), example)
    return [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(labels)]


def from_timm(model: nn.Module, arguments: Mapping[str, Any]) -> Found:
    """Return how timm's evaluation of a model resizes images; `img_size` is its name for another side."""
    shown: Any = model.pretrained_cfg
    kind = shown.get("interpolation")
    share = None if shown.get("crop_mode") == "squash" else float(shown.get("crop_pct") or 1)
    resize = Resize(share, kind if kind in FILTERS else "bilinear")
    side = arguments.get("img_size") or shown["input_size"][-1]
    return {"side": side, "resize": str(resize)}
