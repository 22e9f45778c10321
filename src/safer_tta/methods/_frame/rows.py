"""A state as a few long tensors instead of many short ones, so that those of several streams can be stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import InvalidValueError
from .state import GENERATOR, Snapshot

if TYPE_CHECKING:
    from .method import Method

OPTIMIZER = "optimizer"
STEP = "step"


@dataclass(frozen=True)
class Row:
    """The state of one stream.

    Attributes:
        weights: What learns, (P,).
        moments: What the optimiser remembers of each of them, (P,), and its number of steps; empty before the first.
        noted: Everything else of each precision, (N,).
        generator: The state of the generator.
    """

    weights: Tensor
    moments: Mapping[str, Tensor]
    noted: Mapping[torch.dtype, Tensor]
    generator: Tensor

    def finite(self) -> bool:
        """Return whether every number of it is finite."""
        tensors = [self.weights, *self.moments.values(), *self.noted.values()]
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


class Layout:
    """Where the tensors of a method's state are in a row."""

    def __init__(self, method: Method) -> None:
        state = method.state.initial
        names = {id(tensor): f"model.{name}" for name, tensor in method.state.model.named_parameters()}
        learning = [] if method.optimizer is None else method.optimizer.param_groups[0]["params"]
        self.weights = {names[id(parameter)]: parameter.shape for parameter in learning}
        self.noted: dict[torch.dtype, dict[str, torch.Size]] = {}
        for name, tensor in state.items():
            if name not in self.weights and name != GENERATOR:
                self.noted.setdefault(tensor.dtype, {})[name] = tensor.shape
        self._order = [name for name in state if name != GENERATOR]

    def row(self, state: Mapping[str, Tensor]) -> Row:
        """Return a state as a row; one that does not fit is refused."""
        moments = {name: tensor for name, tensor in state.items() if name.startswith(f"{OPTIMIZER}.")}
        if state.keys() - moments.keys() != {GENERATOR, *self._order}:
            raise InvalidValueError("the state is one of another method or model; expected one of this method")
        return Row(
            weights=_joined(state, self.weights),
            moments=self._moments(moments) if moments else {},
            noted={dtype: _joined(state, names) for dtype, names in self.noted.items()},
            generator=state[GENERATOR],
        )

    def state(self, row: Row) -> Snapshot:
        """Return a row as a state again, in tensors that are parts of it."""
        parts = _parted(row.weights, self.weights)
        for dtype, tensor in row.noted.items():
            parts |= _parted(tensor, self.noted[dtype])
        state = {name: parts[name] for name in self._order}
        shapes = list(self.weights.values())
        for key, tensor in row.moments.items():
            if key == STEP:
                state |= {f"{OPTIMIZER}.{index}.{key}": tensor for index in range(len(shapes))}
            else:
                state |= _parted(tensor, {f"{OPTIMIZER}.{index}.{key}": shape for index, shape in enumerate(shapes)})
        return state | {GENERATOR: row.generator}

    def weights_of(self, stacked: Tensor) -> dict[str, Tensor]:
        """Return the weights in stacked rows (G,P) by name."""
        return _parted(stacked, self.weights)

    def noted_of(self, stacked: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return what is noted in stacked rows (G,N) of a precision by name."""
        return _parted(stacked, self.noted[dtype])

    def _moments(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimiser's memory by its keys. A weight that it does not know has never had a gradient."""
        keys = dict.fromkeys(name.rpartition(".")[2] for name in state)
        known = [f"{OPTIMIZER}.{index}" for index in range(len(self.weights))]
        steps = torch.stack([state[f"{name}.{STEP}"] for name in known if f"{name}.{STEP}" in state]).cpu()
        if bool((steps != steps[0]).any()):
            raise InvalidValueError("the optimiser has taken more steps with some weights; expected as many with all")
        like = next(iter(state.values()))
        empty = {
            f"{name}.{key}": like.new_zeros(shape)
            for key in keys
            for name, shape in zip(known, self.weights.values(), strict=True)
            if f"{name}.{key}" not in state
        }
        whole = {**empty, **state}
        joined = {key: _joined(whole, [f"{name}.{key}" for name in known]) for key in keys if key != STEP}
        return {**joined, STEP: steps[0]}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, torch.Size]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in names]) if names else torch.empty(0)


def _parted(tensor: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    parts = torch.split(tensor, [shape.numel() for shape in shapes.values()], dim=-1)
    first = tensor.shape[:-1]
    return {name: part.view((*first, *shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
