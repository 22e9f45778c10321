"""An optimiser's gradients and memory: whether a step may be taken, and what to save and to put back.

Its memory is flat, {index of the parameter.key: tensor}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


def tensors_of(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{key}": value
        for index, parameter in enumerate(_parameters(optimizer))
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def shapes_for(optimizer: Optimizer, names: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shapes that tensors of these names must have: their parameter's, or none for a count."""
    parameters, shapes = _parameters(optimizer), {}
    for name in names:
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"the state does not fit this model: {name} belongs to no parameter of it")
        shapes[name] = torch.Size() if key == "step" else parameters[int(index)].shape
    return shapes


def load(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the tensors that were there have only been written to."""
    live = tensors_of(optimizer)
    if live.keys() == tensors.keys():
        for name, tensor in tensors.items():
            live[name].copy_(tensor)
        return True
    parameters, fused = _parameters(optimizer), any(group.get("fused") for group in optimizer.param_groups)
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


def finite_gradients(optimizer: Optimizer) -> bool:
    """Whether every gradient that a step would use is; one wait for the device, however many there are."""
    return bool(torch.isfinite(largest_gradient(optimizer)))


def largest_gradient(optimizer: Optimizer) -> Tensor:
    """Of all that a step would use, by size; on the device, where nobody waits for it."""
    gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
    return get_total_norm(gradients, norm_type=math.inf) if gradients else torch.zeros(())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
