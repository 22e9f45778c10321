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

from .. import optimizers, tensorfile
from ..models import Classifier
from ..models.norm import moving_norms

Snapshot = dict[str, Tensor]

FORMAT = "safer-tta.state"
VERSION = 1
GENERATOR = "generator"
PREDICTOR = "predictor"


class State:
    """The declared state of one method."""

    def __init__(self, classifier: Classifier, generator: Generator) -> None:
        self.classifier = classifier
        self.model = classifier.model
        self.generator = generator
        self.optimizers: dict[str, Optimizer] = {}
        self.memory: dict[str, Tensor] = {}
        self.models: dict[str, nn.Module] = {}  # teachers, policies: every tensor of theirs
        self.constants: dict[str, nn.Module] = {}  # never change and are never saved; only follow to a device
        self.adapted: list[str] = []
        self.generation = 0  # counts how often tensors were replaced rather than written to

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
        in_place = [optimizers.load(o, _below(snapshot, f"{label}.")) for label, o in self.optimizers.items()]
        self.generation += not all(in_place)
        if generator:
            self.generator.set_state(snapshot[GENERATOR].cpu())

    def hold(self) -> Snapshot:
        """What a forward pass may move, before it does: running statistics and the generator."""
        return self.hold_statistics() | {GENERATOR: self.generator.get_state()}

    def hold_statistics(self) -> Snapshot:
        return {name: buffer.clone() for name, buffer in self.statistics().items()}

    def forget(self) -> None:
        """What the predictor remembers, until `put_back`."""
        if (memory := self.models.get(PREDICTOR)) is not None:
            for buffer in memory.buffers():
                buffer.zero_()

    def put_back(self, held: Snapshot, *, generator: bool = True) -> None:
        with torch.no_grad():
            for name, buffer in self.statistics().items():
                buffer.copy_(held[name])
        if generator:
            self.generator.set_state(held[GENERATOR])

    def finite(self) -> bool:
        """Whether every number of it is."""
        return all(bool(torch.isfinite(t).all()) for t in self._live().values() if t.is_floating_point())

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live().values())

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.memory = {name: tensor.to(device) for name, tensor in self.memory.items()}
        for module in (*self.models.values(), *self.constants.values()):
            module.to(device)
        for optimizer in self.optimizers.values():
            _fuse(optimizer, device.type == "cuda")
            optimizer.load_state_dict(optimizer.state_dict())  # torch's own way of moving state beside its parameters
        self.generation += 1

    def fingerprint(self, initial: Snapshot) -> str:
        """A hash of the source model, before any adaptation: a state fits only the model it grew from."""
        norms = self.classifier.norms()
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        tensors |= {f"{i}.{name}": b for i, norm in enumerate(norms) for name, b in norm.named_buffers(recurse=False)}
        tensors |= dict(self.classifier.named_buffers(recurse=False))  # mean and std
        before = {id(tensor): initial[name] for name, tensor in self._live().items() if name.startswith("model.")}
        digest = hashlib.blake2b(" ".join(type(norm).__name__ for norm in norms).encode(), digest_size=16)
        for name, tensor in tensors.items():
            source = before.get(id(tensor), tensor)
            digest.update(f"{name}{tuple(source.shape)}".encode())
            digest.update(tensorfile.raw_bytes(source))
        return digest.hexdigest()

    def _live(self) -> dict[str, Tensor]:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        live = {f"model.{name}": tensors[name] for name in self.adapted}
        for label, module in self.models.items():
            live |= {f"{label}.{n}": t for n, t in (*module.named_parameters(), *module.named_buffers())}
        live |= {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        for label, optimizer in self.optimizers.items():
            live |= {f"{label}.{name}": tensor for name, tensor in optimizers.tensors_of(optimizer).items()}
        return live | {GENERATOR: self.generator.get_state()}

    def statistics(self) -> dict[str, Tensor]:
        """What a forward pass moves: running statistics, and what the predictor remembers."""
        adapted = set(self.adapted)
        moving = {name: buffer for name, buffer in self.model.named_buffers() if name in adapted}
        if (memory := self.models.get(PREDICTOR)) is not None:
            moving |= {f"{PREDICTOR}.{name}": buffer for name, buffer in memory.named_buffers()}
        return moving

    def _fixed(self, names: Mapping[str, Tensor]) -> list[str]:
        """Tensors of models: they keep their place and shape, and are copied into."""
        return [name for name in names if name.partition(".")[0] in ("model", *self.models)]

    def _check(self, snapshot: Mapping[str, Tensor]) -> None:
        live = self._live()
        wanted = {n for n in live if not self._of_optimizer(n)}
        came = {n for n in snapshot if not self._of_optimizer(n)}
        if wanted != came:
            raise ValueError(
                f"the state does not fit this method: {sorted(wanted - came)[:3]} missing, "
                f"{sorted(came - wanted)[:3]} unknown. Build the method with the model and options it was saved with"
            )
        shapes = {name: live[name].shape for name in self._fixed(live)} | {GENERATOR: live[GENERATOR].shape}
        for label, optimizer in self.optimizers.items():
            wanted_by = optimizers.shapes_for(optimizer, _below(snapshot, f"{label}."))
            shapes |= {f"{label}.{name}": shape for name, shape in wanted_by.items()}
        for name, shape in shapes.items():
            if shape != snapshot[name].shape:
                raise ValueError(
                    f"the state does not fit this model: {name} is {tuple(snapshot[name].shape)} in it "
                    f"and {tuple(shape)} here"
                )

    def _of_optimizer(self, name: str) -> bool:
        return name.partition(".")[0] in self.optimizers


def write(path: str | os.PathLike[str], snapshot: Snapshot, *, method: str, source: str) -> None:
    header = {"format": FORMAT, "version": str(VERSION), "method": method, "source": source}
    tensorfile.write(path, snapshot, header)


def read(path: str | os.PathLike[str], *, method: str, source: str) -> Snapshot:
    """Read a state of this method grown from this source model; anything else is refused."""
    snapshot, header = tensorfile.read(path)
    if header.get("format") != FORMAT or not header.get("version", "").isdecimal():
        raise ValueError(f"{path} is not a saved state (format {header.get('format')!r}); expected {FORMAT!r}")
    if int(header["version"]) > VERSION:
        raise ValueError(
            f"{path} has state version {header['version']}; this library reads up to {VERSION}. Upgrade safer-tta"
        )
    if header.get("method") != method:
        raise ValueError(f"{path} is a state of {header.get('method')!r}; expected {method!r}")
    if header.get("source") != source:
        raise ValueError(
            f"{path} was saved from another source model, or one with other norms or normalisation "
            f"(hash {header.get('source')}, here {source}). Load it over the model it grew from"
        )
    return snapshot


def _fuse(optimizer: Optimizer, fused: bool) -> None:
    """All parameters in one kernel, on a GPU, where it may be part of a graph; torch's choice elsewhere."""
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"], group["foreach"] = fused or None, None
        if "capturable" in group:
            group["capturable"] = fused
    if not fused:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].cpu()


def _below(snapshot: Mapping[str, Tensor], prefix: str) -> Snapshot:
    return {name.removeprefix(prefix): tensor for name, tensor in snapshot.items() if name.startswith(prefix)}


def learnt(before: Snapshot, after: Snapshot) -> bool:
    """Whether anything was learnt: the generator runs on in any case, and what a predictor remembers is no lesson."""
    if before.keys() != after.keys():
        return True
    lessons = [name for name in before if name.partition(".")[0] not in (GENERATOR, PREDICTOR)]
    return any(not torch.equal(before[name].cpu(), after[name].cpu()) for name in lessons)
