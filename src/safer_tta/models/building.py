"""Networks from the words and numbers in a model's file: nothing in such a file can be run, fetched or unpickled."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import nn

from .._internal import user_code
from .._internal.hashing import hash_bytes
from ..errors import InvalidValueError, MissingPackageError, SaferError, UnknownNameError
from . import zoo

HUGGING_FACE = "hf"
# A network that loads weights by itself would fetch or unpickle them, and some of these names import code.
# `attribute_map` gives other settings these names; those with an underscore are of transformers, such as a path.
REFUSED = re.compile(
    r"(use_)?pretrained(?!_window_sizes$).*|weights.*|checkpoint_path|cache_dir|auto_map|attn_implementation.*|"
    r"quantization_config|(use_)?kernel.*_config|use_kernels|backbone|attribute_map|name_or_path|architecture|_.*"
)
# These models of transformers build a second model, whose name timm would read as an address.
REFUSED_KINDS = re.compile(r"timm_.*|shieldgemma2")
NAME = re.compile(r"\w+(:[\w.]+)?")  # without a scheme, which timm would read as an address


def build(architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return a network with fresh weights.

    Args:
        architecture: A name of the zoo, `timm:NAME`, `torchvision:NAME`, `hf:CLASS` or `MODULE:FACTORY`. A factory is
            a function or class of a file of the user's own that has been loaded in this process.
        arguments: What the function of that name is called with; for `hf` the model's `config`.

    Raises:
        InvalidValueError: If the network cannot be built, or its file of code has not been allowed.
        MissingPackageError: If timm, torchvision or transformers is not installed.
    """
    library, _, name = architecture.partition(":")
    make = _factory(library, name) if is_own_code(architecture) else _known(library, architecture, arguments)
    try:
        model = make(**arguments)
    except SaferError:
        raise
    except Exception as error:  # of the library or of the user's own code
        given = textwrap.shorten(str(dict(arguments)), 200)
        problem = f"{architecture} cannot be built with {given}: {user_code.explain(error)}"
        raise InvalidValueError(f"{problem}. Give other arguments, or another version of {library}") from error
    if not isinstance(model, nn.Module):
        raise InvalidValueError(f"{architecture} returned a {type(model).__name__}; expected a torch.nn.Module")
    return model


def is_own_code(architecture: str) -> bool:
    """Return whether a network is built by code of the user's own."""
    library, _, name = architecture.partition(":")
    return bool(name) and library not in (*zoo.LIBRARIES, HUGGING_FACE)


def code_of(architecture: str) -> str:
    """Return the hash of the user's own file that builds a network; empty for other networks."""
    found = user_code.find(architecture.partition(":")[0]) if is_own_code(architecture) else None
    return "" if found is None else hash_bytes([found.content]).hex()


def _known(library: str, architecture: str, arguments: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Return the function for a network of a library, after a look at what it is called with."""
    settings = list(_settings_in(arguments))
    for name, value in settings:
        if name == "model_type" and REFUSED_KINDS.fullmatch(str(value)):
            raise InvalidValueError(
                f"{architecture} has the model type {value!r}, which builds a model that its file does not describe; "
                "expected a model of transformers itself. Pack the inner network, as with timm:NAME"
            )
    refused = sorted({name for name, _ in settings if REFUSED.fullmatch(name)})
    if refused:
        raise InvalidValueError(
            f"{architecture} has the argument {refused[0]!r}, which may load code or other weights; expected only "
            "arguments that shape the network. Leave it out and pack the weights"
        )
    if not NAME.fullmatch(architecture.partition(",")[0]):
        raise InvalidValueError(f"architecture {architecture} is invalid; expected a name, as in timm:resnet18")
    make = _build_hugging_face if library == HUGGING_FACE else zoo.builder(architecture)
    if library == "torchvision":
        _check_classifies(architecture)
    return make


def _check_classifies(architecture: str) -> None:
    """Refuse torchvision's detectors and the like, some of which fetch weights unless they are told not to."""
    from torchvision import models

    name = architecture.partition(":")[2]
    known = models.list_models(module=models)
    if name not in known:
        raise UnknownNameError.of("architecture", name, known)


def _settings_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all settings that are set, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner:
                yield str(key), inner
            if not _numbers_classes(key, inner):
                yield from _settings_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _settings_in(inner)


def _numbers_classes(key: str, value: Any) -> bool:
    """Return whether the names in a setting of transformers are those of classes, which may be any words."""
    return key == "label2id" and isinstance(value, Mapping) and all(isinstance(n, int) for n in value.values())


def shaping(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Hugging Face model without what only says where and how it was loaded."""
    return {
        key: shaping(value) if isinstance(value, Mapping) and not _numbers_classes(key, value) else value
        for key, value in config.items()
        if not key.startswith("_") and key not in ("name_or_path", "attribute_map")
    }


def missing_transformers(error: Exception) -> MissingPackageError:
    """Make the error for transformers, which imports torchvision if there is one."""
    return MissingPackageError(
        f"this model needs transformers, which cannot be imported ({error}): pip install transformers, and the "
        "torchvision that belongs to your torch"
    )


def _build_hugging_face(config: Mapping[str, Any]) -> nn.Module:
    try:
        from transformers import CONFIG_MAPPING, AutoModelForImageClassification
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS
    except (ImportError, RuntimeError) as error:
        raise missing_transformers(error) from error
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(kind, str):
        given = textwrap.shorten(str(config), 200)
        raise InvalidValueError(f"config is {given}; expected a dict with model_type, as save_pretrained writes it")
    if kind not in CLASSIFIERS:
        raise UnknownNameError.of("model_type", kind, CLASSIFIERS)
    made = CONFIG_MAPPING[kind].from_dict({key: value for key, value in config.items() if key != "model_type"})
    if made.attribute_map != type(made).attribute_map or made.name_or_path:
        raise InvalidValueError(f"the config of {kind} changes what its own settings are called, or names a folder")
    return cast(nn.Module, AutoModelForImageClassification.from_config(made, trust_remote_code=False))


def _factory(module: str, name: str) -> Callable[..., nn.Module]:
    """Return a function of the user's own file. Only what that file defines can be called, not what it imports."""
    file = user_code.find(module)
    if file is None:
        raise InvalidValueError(
            f"the network is built by {name}() in your file {module}.py, and a model's file never runs code by itself. "
            f"If you trust {module}.py, name it: load_classifier(path, code='{module}.py'), or on the command line "
            f"`safer --extension {module}.py serve ...`"
        )
    found = getattr(file.module, name, None)
    if not callable(found) or getattr(found, "__module__", None) != file.module.__name__:
        raise InvalidValueError(
            f"{module}.py defines no function or class {name!r}; expected one that returns the network. Write it there"
        )
    return cast(Callable[..., nn.Module], found)
