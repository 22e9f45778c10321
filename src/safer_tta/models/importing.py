"""From a checkpoint, a Hugging Face folder or a file of one's own to a packed model: what `safer pack` does."""

import argparse
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._internal import safetensors_io
from .._internal.resizing import STRETCH, Resize
from ..errors import InvalidValueError
from . import building, packing, probing, recognising, zoo
from .card import SIDE, Card, check_program
from .classifier import Classifier
from .head import JOIN
from .normalisation import Statistics, read_processors

log = logging.getLogger("safer_tta")

FilePath = str | os.PathLike[str]
PREFIX = f"{building.HUGGING_FACE}:"
Opened = tuple[nn.Module, dict[str, Any]]  # a network, and what is known of it
# Where training programs put the weights in a checkpoint; averaged weights first, as timm does.
PLACES = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "net")
DEEPEST = 8  # places inside one another; a damaged checkpoint may hold itself
PREFIXES = ("_orig_mod.", "module.", "model.", "timm_model.")  # of torch.compile, DataParallel, Lightning, transformers


def pack(
    source: FilePath,
    out: FilePath,
    *,
    weights: FilePath | None = None,
    arguments: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    side: int | None = None,
    resize: str | None = None,
    mean: Statistics | None = None,
    std: Statistics | None = None,
    head: str | None = None,
    output: str | int | None = None,
) -> Card:
    """Write the file of a model from what there is of it.

    Args:
        source: `timm:NAME`, `torchvision:NAME`, a name of the zoo, the folder of a Hugging Face model,
            `FILE.py:FUNCTION` for a function or class of your own, or a packed file.
        out: The file to write.
        weights: A state dict, as safetensors or from torch.save, or a checkpoint that holds one.
        arguments: What the network is built with.
        classes: The names of the classes, in the order of the scores.
        side: Height and width of the model's images, in pixels.
        resize: How images come to that side, such as "crop 0.875 bicubic".
        mean: The mean of every channel in training, of pixels in [0,1].
        std: The standard deviation of every channel. `mean=0, std=1` says that images were not normalised.
        head: The name of the layer that gives the scores.
        output: Where the scores are in what the network returns: a key or attribute, or an index.

    Raises:
        InvalidValueError: If something is missing or does not fit together; the message says what to give.
    """
    asked = {"arguments": arguments or None, "classes": classes, "side": side, "resize": resize}
    given = {name: value for name, value in asked.items() if value is not None}
    network, found = _open(source, weights, dict(arguments or {}), head)
    shown = {name: found.pop(name, None) for name in ("mean", "std", "head", "output")}
    if mean is not None or std is not None:
        shown |= {"mean": mean, "std": std}
    shown |= {name: value for name, value in (("head", head), ("output", output)) if value is not None}
    classifier = Classifier(network, **shown)
    if folder := _folder(source):
        known = {**found, **given}
        trusted = {*given, *({"mean"} if mean is not None else ())}
        probing.check(folder, classifier, known.get("side"), known.get("resize", str(STRETCH)), trusted)
    if not classifier.normalised_by:
        raise InvalidValueError(
            f"{source} does not say how images were normalised in training. Give mean and std, for pixels in [0,1]: "
            "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 are ImageNet's; --mean 0 --std 1 means that they were not"
        )
    return packing.save(classifier, out, **{**found, **given})


def _open(source: FilePath, weights: FilePath | None, arguments: dict[str, Any], head: str | None) -> Opened:
    """Return a network with its weights, and what is known of it."""
    text = os.fspath(source)
    if folder := _folder(source):
        _check_alone(folder, weights)
        return _open_folder(folder)
    if text.startswith(PREFIX):
        raise InvalidValueError(
            f"{text.removeprefix(PREFIX)} is not a folder; expected the one that save_pretrained wrote, on this machine"
        )
    file = Path(text)
    if file.suffix == ".py":
        raise InvalidValueError(f"{text} names a file without a function; expected {text}:FUNCTION, which builds it")
    if file.is_file():
        classifier = packing.load_classifier(file)
        _check_alone(file, weights)
        card = classifier.card
        assert card is not None
        # The file says how images are normalised, and what the library knows for the name does not count.
        known = {**vars(card), "mean": card.mean or 0.0, "std": card.std or 1.0}
        return classifier.model, {name: value for name, value in known.items() if name != "code"}
    return _open_architecture(text, weights, arguments, head)


def _folder(source: FilePath) -> Path | None:
    """Return the folder of a Hugging Face model, if that is the source."""
    folder = Path(os.fspath(source).removeprefix(PREFIX))
    return folder if folder.is_dir() else None


def _check_alone(source: Path, weights: FilePath | None) -> None:
    if weights is not None:
        raise InvalidValueError(f"weights is {weights} and {source} has its own; leave weights out")


def _open_architecture(text: str, weights: FilePath | None, arguments: dict[str, Any], head: str | None) -> Opened:
    found = recognising.resolve(text)
    architecture, own = found["architecture"], building.is_own_code(found["architecture"])
    if weights is None:
        if not own:
            zoo.builder(architecture)  # an unknown name is what has to be put right first
            raise InvalidValueError(
                f"{text} names a network without weights. Give weights, the file of its state dict: safer pack {text} "
                "--weights WEIGHTS.pth --out model.safetensors"
            )
        return building.build(architecture, arguments), {**found, "arguments": arguments}
    tensors, metadata = read_weights(weights)
    note = metadata.get("architecture", "").partition(",")[2]  # where the strides of a residual network are
    found["architecture"] = f"{architecture},{note}" if note and architecture == "resnet50" else architecture
    model, tensors = _build_for(found["architecture"], arguments, tensors, head, own)
    try:
        zoo.load(model, tensors, origin=os.fspath(weights), new_head=False)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error}. Give the arguments with which it was built ({arguments} here)") from error
    if "mean" in metadata and "std" in metadata:
        found |= {name: tuple(map(float, metadata[name].split(","))) for name in ("mean", "std")}
    known = recognising.from_timm(model, arguments) if architecture.startswith("timm:") else {}
    known = {"side": SIDE, "resize": "crop 0.875"} if architecture.startswith("torchvision:") else known
    return model, {**known, **found, "arguments": arguments}


def _build_for(
    architecture: str, arguments: dict[str, Any], tensors: dict[str, Tensor], head: str | None, own: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a network with as many classes as these weights, and them by its names.

    How many classes there are is added to the arguments.
    """
    model = building.build(architecture, arguments)
    tensors = _strip(tensors, model.state_dict())
    if own or "num_classes" in arguments:
        return model, tensors
    classifier = Classifier(model, head=head)
    rows = tensors.get(f"{classifier.head_name.partition(JOIN)[0]}.weight")
    arguments["num_classes"] = classifier.num_classes if rows is None else len(rows)
    same = arguments["num_classes"] == classifier.num_classes
    return model if same else building.build(architecture, arguments), tensors


# --- weights --------------------------------------------------------------------------------------------------------


def read_weights(path: FilePath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file or a checkpoint of torch.save, and the text beside them."""
    if os.fspath(path).endswith(".safetensors"):
        return safetensors_io.read(path)
    check_program(path)
    try:
        # Checkpoints of timm's training keep its options, which are only a bag of numbers and words.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch's reader raises errors of many kinds
        problem = f"{path} holds more than weights, or is damaged, and to unpickle it could run code"
        raise InvalidValueError(
            f"{problem}. Where the model is, write torch.save(model.state_dict(), 'weights.pth') and pack that"
        ) from error
    return _find_state(content, path), {}


def _find_state(content: Any, path: FilePath) -> dict[str, Tensor]:
    """Return the state dict in a checkpoint, however deep it is."""
    for _ in range(DEEPEST):
        inner = content if isinstance(content, Mapping) else {}
        name = next((name for name in PLACES if isinstance(inner.get(name), Mapping)), None)
        if name is None:
            break
        log.info("%s: taking the weights under %r", path, name)
        content = content[name]
    tensors = {str(n): t for n, t in content.items() if isinstance(t, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors or len(tensors) < len(content):
        held = list(content)[:5] if isinstance(content, Mapping) else type(content).__name__
        raise InvalidValueError(
            f"{path} holds {held}; expected a state dict, or a checkpoint with one under {', '.join(PLACES)}"
        )
    return tensors


def _strip(tensors: dict[str, Tensor], known: Collection[str]) -> dict[str, Tensor]:
    """Take off the prefixes that wrappers put before every name, if there is then a name that the network has."""
    shorter = tensors
    while not any(name in known for name in shorter):
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in shorter)), None)
        if prefix is None:
            return tensors
        shorter = {name.removeprefix(prefix): tensor for name, tensor in shorter.items()}
    return shorter


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _open_folder(folder: Path) -> Opened:
    """Return the model of a local folder as transformers loads it, and what its files say of it."""
    _refuse_timm(folder)
    try:
        from transformers import AutoModelForImageClassification
    except (ImportError, RuntimeError) as error:
        raise building.missing_transformers(error) from error
    try:
        model, report = AutoModelForImageClassification.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # of many kinds; the folder is the user's
        problem = f"{folder} cannot be loaded as an image classifier ({type(error).__name__}: {error})"
        raise InvalidValueError(f"{problem}. Expected what save_pretrained wrote") from error
    lacking = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if lacking:
        raise InvalidValueError(
            f"{folder} lacks {len(lacking)} weights of a {type(model).__name__}, such as {lacking[0]}; expected a "
            "trained classifier and not only its backbone"
        )
    found = recognising.from_config(type(model).__name__, json.loads(model.config.to_json_string()))
    # The Classifier reads the normalisation of the same folder.
    sizes = (_read_size(told) for _, told in read_processors(folder))
    return model.eval(), {**found, **next(sizes, {})}


def _refuse_timm(folder: Path) -> None:
    """Refuse a folder with a model of timm, which transformers only wraps, and say how to pack it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture, wrapped = config.get("architecture"), config.get("model_type", "timm_wrapper") == "timm_wrapper"
    except (OSError, ValueError, AttributeError):
        return  # transformers says what is wrong with it
    if not architecture or not wrapped:
        return
    shown = config.get("pretrained_cfg") or {}
    parts = {name: ",".join(map(str, shown[name])) for name in ("mean", "std") if isinstance(shown.get(name), list)}
    options = "".join(f" --{name} {numbers}" for name, numbers in parts.items())
    raise InvalidValueError(
        f"{folder} holds a model of timm. Pack it as that: safer pack timm:{architecture} --weights "
        f"{folder}/model.safetensors{options} --out model.safetensors"
    )


def _read_size(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the side and the resize rule of an image processor, as far as it has them."""
    size, crop = told.get("size"), told.get("crop_size")
    if isinstance(size, int):  # as older files have it; ConvNeXt's is that of the shorter side
        size = {"shortest_edge" if told.get("crop_pct") else "height": size}
    size = size or {}
    crop = {"height": crop} if isinstance(crop, int) else crop or {}
    kind = "bicubic" if told.get("resample") == 3 else "bilinear"
    shorter = size.get("shortest_edge")
    if shorter is None:
        return {"side": int(size["height"]), "resize": f"stretch {kind}"} if "height" in size else {}
    if told.get("crop_pct") and shorter >= 384:  # such processors of ConvNeXt crop only smaller images
        return {"side": int(shorter), "resize": f"stretch {kind}"}
    cropped = told.get("do_center_crop", True) and "height" in crop
    side = int(crop["height"] if cropped else shorter)
    share = told.get("crop_pct") or side / shorter
    return {"side": side, "resize": str(Resize(min(1.0, share), kind))}
