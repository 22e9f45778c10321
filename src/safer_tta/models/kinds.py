"""Kinds of model that cannot be adapted as they are. Each refusal says what to give instead."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..errors import InvalidTypeError


def check_kind(model: object) -> None:
    """Refuse what is not a module, and modules whose layers cannot be reached or cannot learn."""
    if not isinstance(model, nn.Module):
        exported = type(model).__name__ == "ExportedProgram"
        raise InvalidTypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module"
            + (_AS_IT_WAS.format(made="exported") if exported else "")
        )
    if _is_dual_encoder(model):
        raise InvalidTypeError(
            f"model is a {type(model).__name__}, which compares images with texts; expected class scores. Give it one "
            "text feature for each class: adapt(safer_tta.models.zero_shot(model, text_features))"
        )
    for problem in _problems(model):
        raise InvalidTypeError(problem)


_AS_IT_WAS = ". Give the module that was {made}: adapt(module)"


def _problems(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        what = f"layer {name!r} of the model" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{what} is TorchScript, whose layers have no features to read" + _AS_IT_WAS.format(made="scripted")
        elif type(module).__name__ == "OptimizedModule":  # its class would cost the import of the whole compiler
            whole = "adapt(model._orig_mod)" if not name else f"model.set_submodule({name!r}, model.{name}._orig_mod)"
            yield f"{what} is compiled already; compile=True compiles later. Give the module from before: {whole}"
        elif ".quantized" in type(module).__module__ or _has_integers(module):
            yield f"{what} is quantised ({type(module).__name__}) and cannot learn" + _AS_IT_WAS.format(
                made="quantised"
            )
        elif isinstance(module, torch.fx.GraphModule) and _is_exported(module):
            yield f"{what} comes from torch.export, which leaves no layers" + _AS_IT_WAS.format(made="exported")
        elif any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
            yield (
                f"{what} is a {type(module).__name__} that has no weights yet. Pass a batch through the model first: "
                "model(images)"
            )


def _has_integers(module: nn.Module) -> bool:
    """Whether a layer holds its weights as integers."""
    return any(not parameter.is_floating_point() for parameter in module.parameters(recurse=False))


def _is_exported(module: torch.fx.GraphModule) -> bool:
    """Whether a graph calls operators instead of layers."""
    return any(isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes)


def _is_dual_encoder(model: nn.Module) -> bool:
    """Whether a model compares images with texts, as CLIP does, and so returns no class scores by itself."""
    pairs = (("encode_image", "encode_text"), ("get_image_features", "get_text_features"))
    return any(all(callable(getattr(model, name, None)) for name in pair) for pair in pairs)
