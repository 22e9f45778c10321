"""Everything that changes while a method adapts, declared once: reset, snapshot, rollback, save and load follow.

A state is a flat {name: tensor}: the adapted tensors of the classifier, the optimiser's, the method's own memories
and the generator. It is a difference to the source model, not a model: for Tent it is tens of kilobytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from .. import tensorfile
from ..models.norm import moving_norms

Snapshot = dict[str, Tensor]

FORMAT = "safer-tta.state"
VERSION = 1
GENERATOR = "generator"


class State:
    """The declared state of one method."""

    def __init__(self, model: nn.Module, generator: Generator) -> None:
        self.model = model
        self.generator = generator
        self.optimizers: dict[str, Optimizer] = {}
        self.memory: dict[str, Tensor] = {}
        self.adapted: list[str] = []

    def declare_adapted(self) -> None:
        """Count in what of the model moves: parameters that learn, and running statistics in train mode."""
        moving = {id(b) for norm in moving_norms(self.model.modules()) for b in norm.buffers(recurse=False)}
        self.adapted = [n for n, p in self.model.named_parameters() if p.requires_grad]
        self.adapted += [n for n, b in self.model.named_buffers() if id(b) in moving]

    def snapshot(self) -> Snapshot:
        """A copy of everything."""
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def load(self, snapshot: Mapping[str, Tensor], *, generator: bool = True) -> None:
        """Go back to a snapshot. Checked as a whole before the first tensor is touched."""
        self._check(snapshot)
        live = self._live()
        with torch.no_grad():
            for name in self._fixed(live):
                live[name].copy_(snapshot[name])
        for name in self.memory:
            self.memory[name] = snapshot[f"memory.{name}"].to(self.memory[name].device, copy=True)
        for label, optimizer in self.optimizers.items():
            _load_optimizer(optimizer, _below(snapshot, f"{label}."))
        if generator:
            self.generator.set_state(snapshot[GENERATOR].cpu())

    def hold(self) -> Snapshot:
        """What a forward pass may move, before it does: running statistics and the generator."""
        return {n: b.clone() for n, b in self._statistics().items()} | {GENERATOR: self.generator.get_state()}

    def put_back(self, held: Snapshot, *, generator: bool = True) -> None:
        with torch.no_grad():
            for name, buffer in self._statistics().items():
                buffer.copy_(held[name])
        if generator:
            self.generator.set_state(held[GENERATOR])

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live().values())

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.memory = {name: tensor.to(device) for name, tensor in self.memory.items()}
        for optimizer in self.optimizers.values():
            optimizer.load_state_dict(optimizer.state_dict())  # torch's own way of moving state beside its parameters

    def fingerprint(self, initial: Snapshot) -> str:
        """A hash of the source model, before any adaptation: a state fits only the model it grew from."""
        digest = hashlib.blake2b(digest_size=16)
        adapted = set(self.adapted)
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            source = initial[f"model.{name}"] if name in adapted else tensor
            digest.update(f"{name}{tuple(source.shape)}".encode())
            digest.update(tensorfile.raw_bytes(source))
        return digest.hexdigest()

    def _live(self) -> dict[str, Tensor]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        live = {f"model.{name}": tensors[name] for name in self.adapted}
        live |= {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        for label, optimizer in self.optimizers.items():
            live |= {f"{label}.{name}": tensor for name, tensor in _optimizer_tensors(optimizer).items()}
        return live | {GENERATOR: self.generator.get_state()}

    def _statistics(self) -> dict[str, Tensor]:
        adapted = set(self.adapted)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in adapted}

    def _fixed(self, names: Mapping[str, Tensor]) -> list[str]:
        return [name for name in names if name.startswith("model.")]

    def _check(self, snapshot: Mapping[str, Tensor]) -> None:
        live = self._live()
        wanted = {n for n in live if not self._of_optimizer(n)}
        came = {n for n in snapshot if not self._of_optimizer(n)}
        if wanted != came:
            raise ValueError(
                f"the state does not fit this method: {sorted(wanted - came)[:3]} missing, "
                f"{sorted(came - wanted)[:3]} unknown. Build the method with the model and options it was saved with"
            )
        for name in self._fixed(live):
            if live[name].shape != snapshot[name].shape:
                raise ValueError(
                    f"the state does not fit this model: {name} is {tuple(snapshot[name].shape)} in it "
                    f"and {tuple(live[name].shape)} here"
                )

    def _of_optimizer(self, name: str) -> bool:
        return name.partition(".")[0] in self.optimizers


def write(path: str | os.PathLike[str], snapshot: Snapshot, *, method: str, source: str) -> None:
    header = {"format": FORMAT, "version": str(VERSION), "method": method, "source": source}
    tensorfile.write(path, snapshot, header)


def read(path: str | os.PathLike[str], *, method: str, source: str) -> Snapshot:
    """Read a state of this method grown from this source model; anything else is refused."""
    snapshot, header = tensorfile.read(path)
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved state (format {header.get('format')!r}); expected {FORMAT!r}")
    if int(header["version"]) > VERSION:
        raise ValueError(
            f"{path} has state version {header['version']}; this library reads up to {VERSION}. Upgrade safer-tta"
        )
    if header["method"] != method:
        raise ValueError(f"{path} is a state of {header['method']!r}; expected {method!r}")
    if header["source"] != source:
        raise ValueError(
            f"{path} was saved from another source model (hash {header['source']}, here {source}). "
            "A state is a difference: load it over the model it grew from"
        )
    return snapshot


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{index}.{key}": value
        for index, parameter in enumerate(parameters)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)]
        # Adam keeps its step count on the CPU; everything else lies beside its parameter.
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = tensor.to(device, copy=True)


def _below(snapshot: Mapping[str, Tensor], prefix: str) -> Snapshot:
    return {name.removeprefix(prefix): tensor for name, tensor in snapshot.items() if name.startswith(prefix)}
