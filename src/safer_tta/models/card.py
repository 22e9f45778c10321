"""What a model's file says beside the weights, and what to do with files that say nothing."""

import json
import math
import os
import reprlib
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .._internal import checks, safetensors_io
from .._internal.resizing import STRETCH, Resize
from ..errors import InvalidTypeError, InvalidValueError

FORMAT = "safer-tta.model"
SIDE = 224  # pixels, of models that do not say
DEEPEST = 20  # levels of lists and dicts in what a network is built with
LARGEST_SIDE = 4096  # of the images that a file can ask for
FilePath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model's file says beside the weights."""

    architecture: str  # how the network is built; `building.build` explains the names
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of that function
    classes: tuple[str, ...]  # their names, in the order of the scores
    side: int = SIDE  # height and width of its images
    resize: str = str(STRETCH)  # how other images come to that side
    head: str | None = None  # the name of the layer that gives the scores; "a+b" averages two
    output: str | int | None = None  # where the scores are in what the network returns; None: it returns them
    mean: tuple[float, ...] | None = None  # of each channel, of images in [0,1]; None: images stay as they are
    std: tuple[float, ...] | None = None
    code: str = ""  # the hash of the user's own file that builds the network, when it was packed

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str):
            raise InvalidTypeError(f"architecture is {self.architecture!r}; expected a name, as in timm:resnet18")
        _check_arguments(self.arguments)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not all(isinstance(n, int | float) and math.isfinite(n) for n in values):
                raise InvalidValueError(f"{name} is {values}; expected a finite number for each channel")
        checks.count(side=self.side)
        if self.side > LARGEST_SIDE:
            raise InvalidValueError(f"side is {self.side}; expected at most {LARGEST_SIDE} pixels")
        Resize.parse(self.resize)
        if not isinstance(self.head, str | None):
            raise InvalidTypeError(f"head is {self.head!r}; expected the name of a layer")
        if not isinstance(self.output, str | int | None):
            raise InvalidTypeError(f"output is {self.output!r}; expected a key or an index of what the network returns")
        if not self.classes:
            raise InvalidValueError("classes are empty; expected one name for each")
        if len(set(self.classes)) < len(self.classes):
            double = [name for name, count in Counter(self.classes).items() if count > 1]
            named = ", ".join(map(repr, double[:5])) + (f" and {len(double) - 5} more" if len(double) > 5 else "")
            raise InvalidValueError(f"classes have {named} more than once; expected one name for each, all different")

    def metadata(self) -> dict[str, str]:
        """Return it as text for the header of a file."""
        packed = {name: value for name, value in asdict(self).items() if name not in ("architecture", "mean", "std")}
        shown = {"mean": self.mean, "std": self.std}
        return {
            "format": FORMAT,
            "architecture": self.architecture,
            "packed": _to_json(packed),
            **{name: ",".join(map(str, values)) for name, values in shown.items() if values is not None},
        }

    @classmethod
    def of(cls, path: FilePath, metadata: Mapping[str, str]) -> "Card":
        """Read it from the header of a file."""
        if metadata.get("format") != FORMAT or "architecture" not in metadata:
            raise InvalidValueError(f"{path} {_what_else(metadata)}")
        try:
            return cls._parse(metadata)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            problem = f"{path} describes its model in another way than this version ({type(error).__name__}: {error})"
            raise InvalidValueError(f"{problem}. Update safer-tta, or pack the model again") from error

    @classmethod
    def _parse(cls, metadata: Mapping[str, str]) -> "Card":
        known: dict[str, Any] = {"architecture": metadata["architecture"]}
        known |= {name: tuple(map(float, metadata[name].split(","))) for name in ("mean", "std") if name in metadata}
        if "packed" not in metadata:  # a model that was trained before files were packed
            recipe = json.loads(metadata["recipe"])
            known |= {"classes": recipe["classes"], "side": recipe.get("side") or SIDE}
            known |= {"arguments": {"num_classes": len(recipe["classes"])}}
        else:
            known |= json.loads(metadata["packed"])
        return cls(**{**known, "classes": tuple(known["classes"])})


def read_card(path: FilePath) -> Card:
    """Return what a file says of its model, without reading the weights.

    Raises:
        InvalidValueError: If it is another kind of file; the message says how to pack what is in it.
        TensorFileError: If it is damaged.
    """
    return Card.of(path, read_metadata(path))


def read_metadata(path: FilePath) -> dict[str, str]:
    """Return the header's text of a safetensors file; other kinds of files are refused with what to do."""
    check_kind(path)
    return safetensors_io.read_metadata(path)


def find_card(path: FilePath) -> Card | None:
    """Return the card of a model's file; None for weights without one."""
    if not Path(path).is_file():
        return None
    metadata = read_metadata(path)
    return Card.of(path, metadata) if metadata.get("format") == FORMAT else None


def _check_arguments(arguments: Any) -> None:
    """Refuse what no function could be called with."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise InvalidTypeError(f"arguments are {reprlib.repr(arguments)}; expected a dict of names and values")
    level: list[Any] = [arguments]
    for _ in range(DEEPEST):
        inside = (list(v.values()) if isinstance(v, Mapping) else v for v in level)
        level = [one for values in inside if isinstance(values, list | tuple) for one in values]
    if level:
        raise InvalidValueError(f"arguments are nested deeper than {DEEPEST} levels; expected flatter settings")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError as error:
        raise InvalidTypeError(
            f"{error}; the arguments of an architecture are kept as text. Give numbers, words, lists and dicts"
        ) from error


# --- files of other kinds -------------------------------------------------------------------------------------------


def check_kind(path: FilePath) -> None:
    """Refuse a file or folder that is another kind of model, and say which command packs it."""
    place = Path(path)
    if place.is_dir():
        if (place / "config.json").is_file():
            raise InvalidValueError(f"{path} is a Hugging Face folder. Pack it: {_line(path)}")
        raise InvalidValueError(f"{path} is a folder; expected a file that `safer pack` or `safer train` wrote")
    check_program(path)
    with place.open("rb") as file:
        if file.read(2) in (b"PK", b"\x80\x02"):  # a zip archive or a bare pickle
            problem = f"{path} is a checkpoint of torch.save"
            raise InvalidValueError(f"{problem}. Pack it with its architecture: {_line('timm:NAME', path)}")


def check_program(path: FilePath) -> None:
    """Refuse a graph or program that was exported from a model."""
    kind = ""
    if Path(path).suffix == ".onnx":
        kind = "an ONNX graph"
    elif zipfile.is_zipfile(path):
        names = _names_in(path)
        if any("/code/" in name or name.endswith((".json", "/models/model")) for name in names):
            kind = "a TorchScript or exported program"
    if kind:
        raise InvalidValueError(
            f"{path} is {kind}, whose layers cannot learn. Pack the network and the weights that it came from: "
            f"{_line('FILE.py:FUNCTION', 'WEIGHTS.pth')}"
        )


def _names_in(path: FilePath) -> list[str]:
    """Return the names in a zip file, or an empty list if it is damaged; reading it then gives the error."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.namelist()
    except Exception:  # zipfile raises errors of many kinds
        return []


def _what_else(metadata: Mapping[str, str]) -> str:
    if "format" in metadata and metadata["format"] != "pt":
        return f"has the format {metadata['format']!r}; expected a model, which `safer pack` or `safer train` writes"
    return (
        "holds weights without a description of their network. Pack them with their architecture: "
        f"{_line('timm:NAME', 'WEIGHTS.safetensors')}"
    )


def _line(what: object, weights: object = None) -> str:
    given = "" if weights is None else f" --weights {weights}"
    return f"safer pack {what}{given} --out model.safetensors"
