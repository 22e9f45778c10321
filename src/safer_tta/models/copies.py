"""Copies of models, and the tensors that models keep between passes."""

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import InvalidTypeError

M = TypeVar("M", bound=nn.Module)


def copy_model(model: M) -> M:
    """Return a deep copy. Tensors that a module computed before are copied as they are, without their graph."""
    try:
        return copy.deepcopy(model, computed(model))
    except Exception as error:
        raise InvalidTypeError(
            f"the model cannot be copied ({type(error).__name__}: {error}). Adapt it in place: adapt(model, copy=False)"
        ) from error


def caches_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where layers keep what they computed in eval mode, such as attention biases by device."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_cache") and type(value) is dict
    ]


def computed(model: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors with a graph that modules hold, which torch refuses to copy, for deepcopy's memo."""
    return {id(tensor): tensor.detach().clone() for tensor in _with_graph(model)}


def _with_graph(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for value in vars(module).values():
            inner = value.values() if isinstance(value, dict) else [value]
            yield from (t for t in inner if isinstance(t, Tensor) and t.grad_fn is not None)
