"""An optimiser's gradients, steps and memory; its memory is flat, {index of the parameter.key: tensor}."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Adam, Optimizer

from ..errors import InvalidValueError

KEYS = {Adam: {"step", "exp_avg", "exp_avg_sq"}, SGD: {"momentum_buffer"}}  # what they remember of a parameter


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{key}": value
        for index, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def shapes_for(optimizer: Optimizer, names: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes that tensors of these names must have: their parameter's, or none for a count."""
    parameters = _parameters(optimizer)
    _check_keys(optimizer, names)
    shapes = {}
    for name in names:
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise InvalidValueError(f"the state does not fit this model: {name} belongs to no parameter of it")
        shapes[name] = torch.Size() if key == "step" else parameters[int(index)].shape
    return shapes


def _check_keys(optimizer: Optimizer, names: Mapping[str, Tensor]) -> None:
    """Refuse a memory that is not whole; the next step would fail, or go on as if it were new."""
    found: dict[str, set[str]] = {}
    for name in names:
        index, _, key = name.partition(".")
        found.setdefault(index, set()).add(key)
    wanted = KEYS.get(type(optimizer), next(iter(found.values()), set()))
    if optimizer.param_groups[0].get("amsgrad"):
        wanted = wanted | {"max_exp_avg_sq"}
    for index, keys in found.items():
        if keys != wanted:
            raise InvalidValueError(
                f"the state does not fit this method: its optimiser has {sorted(keys)} of parameter {index}; expected "
                f"{sorted(wanted)}. Build the method with the options it was saved with"
            )


def load(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> bool:
    """Continue from these tensors; return whether the tensors that were there have only been written to."""
    live = tensors_of(optimizer)
    if live.keys() == tensors.keys():
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        return True
    parameters = _parameters(optimizer)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    optimizer.state.clear()
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        if key == "step":  # Adam keeps its count on the CPU, unless it is fused
            own = tensor.to(parameter.device if fused else "cpu", copy=True)
        else:  # laid out as the parameter is, channels last if that is: a fused step asks for it
            own = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
        optimizer.state[parameter][key] = own
    return False


def fuse(optimizer: Optimizer, fused: bool) -> None:
    """Let one kernel update all parameters, on a GPU, where it may be part of a graph; elsewhere torch chooses."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group.update(fused=fused or None, foreach=None)
        if "capturable" in group:
            group["capturable"] = fused
    if not fused:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].cpu()


def step_unless(skip: Tensor, optimizer: Optimizer) -> None:
    """Take a step of a fused optimiser unless `skip` is true: torch's own way for gradients that overflowed."""
    given: Any = optimizer
    given.found_inf, given.grad_scale = skip.float(), None
    try:
        optimizer.step()
    finally:
        del given.found_inf, given.grad_scale


def finite_gradients(optimizer: Optimizer) -> bool:
    """Return whether every gradient that a step would use is finite, waiting for the device once."""
    return bool(torch.isfinite(largest_gradient(optimizer)))


def largest_gradient(optimizer: Optimizer) -> Tensor:
    """Return the size of the largest gradient that a step would use, on the device."""
    gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
    return get_total_norm(gradients, norm_type=math.inf) if gradients else torch.zeros(())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
