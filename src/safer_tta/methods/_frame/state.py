"""Everything that changes while a method adapts, declared once: reset, snapshot, rollback, save and load follow.

A state is a flat {name: tensor}: the adapted tensors of the classifier, the optimiser's, the memories of the method
and the predictor, and the generator. It is a difference to the source model: for Tent, tens of kilobytes.
"""

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._internal import optimizers, safetensors_io
from ...errors import InvalidValueError
from ...models.norm import moving_norms
from ...models.stream_norm import FOLLOWED
from ...predictors import Predictor

Snapshot = dict[str, Tensor]

FORMAT = "safer-tta.state"
VERSION = 1
GENERATOR = "generator"
MEMORY = "predictor"  # the predictor's memory, in the names of a state
STREAM = "stream"  # what is known of the statistics of the stream


class State:
    """The declared state of one method."""

    def __init__(self, predictor: Predictor) -> None:
        self.classifier = predictor.classifier
        self.model = predictor.classifier.model
        self.generator = predictor.generator
        self.optimizers: dict[str, Optimizer] = {}  # their moments are state
        self.memory: dict[str, Tensor] = {}  # what a method replaces as it learns
        self.models: dict[str, nn.Module] = {}  # every tensor of these is state: teachers and policies
        self.constants: dict[str, nn.Module] = {}  # never changed and never saved; they only follow to a device
        # What the predictor remembers; it is put back after a failure or a mere look.
        self.memories: dict[str, nn.Module] = {} if predictor.memory is None else {MEMORY: predictor.memory}
        self.adapted: list[str] = []  # the names of what changes in the model
        self.initial: Snapshot = {}  # the state before the first batch
        self.generation = 0  # how often tensors were replaced rather than written to

    def start(self) -> None:
        """Declare what of the model changes (parameters that learn, running statistics in train mode); note it all."""
        moving = {id(b) for norm in moving_norms(self.model.modules()) for b in norm.buffers(recurse=False)}
        statistics = self.classifier.statistics
        if statistics is not None and statistics.active:
            moving |= {id(getattr(layer, name)) for layer in statistics.following for name in FOLLOWED}
            self.memories[STREAM] = statistics.window
        self.adapted = [n for n, p in self.model.named_parameters() if p.requires_grad]
        self.adapted += [n for n, b in self.model.named_buffers() if id(b) in moving]
        self.initial = self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return a copy of everything."""
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def load(self, snapshot: Mapping[str, Tensor], *, generator: bool = True) -> None:
        """Return to a snapshot, which is checked as a whole before the first tensor is touched."""
        self.check(snapshot)
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
        """Return what a forward pass may move, before it does: running statistics, memories and the generator."""
        return self.hold_statistics() | {GENERATOR: self.generator.get_state()}

    def hold_statistics(self) -> Snapshot:
        return {name: buffer.clone() for name, buffer in self.statistics().items()}

    def put_back(self, held: Snapshot, *, generator: bool = True) -> None:
        """Undo what a forward pass has moved since `hold`."""
        with torch.no_grad():
            for name, buffer in self.statistics().items():
                buffer.copy_(held[name])
        if generator:
            self.generator.set_state(held[GENERATOR])

    def drop_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def finite(self) -> bool:
        """Return whether every number of it is finite."""
        return all(bool(torch.isfinite(t).all()) for t in self._live().values() if t.is_floating_point())

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live().values())

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        self.memory = {name: tensor.to(device) for name, tensor in self.memory.items()}
        for module in (*self.models.values(), *self.memories.values(), *self.constants.values()):
            module.to(device)
        for optimizer in self.optimizers.values():
            optimizers.fuse(optimizer, device.type == "cuda")
            optimizer.load_state_dict(optimizer.state_dict())  # torch's own way of moving state beside its parameters
        self.generation += 1

    def save(self, path: str | os.PathLike[str], method: str) -> None:
        """Write it to a safetensors file."""
        header = {"format": FORMAT, "version": str(VERSION), "method": method, "source": self.source}
        safetensors_io.write(path, self.snapshot(), header)

    def read(self, path: str | os.PathLike[str], method: str) -> Snapshot:
        """Read a state of this method that grew from this source model; any other file is refused."""
        snapshot, header = safetensors_io.read(path)
        if header.get("format") != FORMAT or not header.get("version", "").isdecimal():
            raise InvalidValueError(
                f"{path} is not a saved state (format {header.get('format')!r}); expected {FORMAT!r}"
            )
        if int(header["version"]) > VERSION:
            raise InvalidValueError(
                f"{path} has state version {header['version']}; this library reads up to {VERSION}. Upgrade safer-tta"
            )
        if header.get("method") != method:
            raise InvalidValueError(f"{path} is a state of {header.get('method')!r}; expected {method!r}")
        if header.get("source") != self.source:
            raise InvalidValueError(
                f"{path} was saved from another source model, or one with other norms or normalisation "
                f"(hash {header.get('source')}, here {self.source}). Load it over the model it grew from"
            )
        safetensors_io.check_finite(path, snapshot)
        return snapshot

    @functools.cached_property
    def source(self) -> str:
        """A hash of the source model before any adaptation: a state fits only the model it came from."""
        norms = self.classifier.norms()
        tensors: dict[str, Tensor] = dict(self.model.named_parameters())
        tensors |= {f"{i}.{name}": b for i, norm in enumerate(norms) for name, b in norm.named_buffers(recurse=False)}
        tensors |= dict(self.classifier.named_buffers(recurse=False))  # mean and std
        before = {id(tensor): self.initial[n] for n, tensor in self._live().items() if n.startswith("model.")}
        digest = hashlib.blake2b(" ".join(type(norm).__name__ for norm in norms).encode(), digest_size=16)
        for name, tensor in tensors.items():
            original = before.get(id(tensor), tensor)
            digest.update(f"{name}{tuple(original.shape)}".encode())
            digest.update(safetensors_io.raw_bytes(original))
        return digest.hexdigest()

    def statistics(self) -> dict[str, Tensor]:
        """Return what a step moves without learning: running statistics, and what predictors remember."""
        adapted = set(self.adapted)
        moving = {name: buffer for name, buffer in self.model.named_buffers() if name in adapted}
        return moving | _tensors_of(self.memories)

    def _live(self) -> dict[str, Tensor]:
        tensors = _tensors_of({"model": self.model})
        live = {f"model.{name}": tensors[f"model.{name}"] for name in self.adapted}
        live |= _tensors_of(self.models | self.memories)
        live |= {f"memory.{name}": tensor for name, tensor in self.memory.items()}
        for label, optimizer in self.optimizers.items():
            live |= {f"{label}.{name}": tensor for name, tensor in optimizers.tensors_of(optimizer).items()}
        return live | {GENERATOR: self.generator.get_state()}

    def _fixed(self, names: Mapping[str, Tensor]) -> list[str]:
        """Return the tensors of models: they keep their place and shape, and are copied into."""
        return [name for name in names if name.partition(".")[0] in ("model", *self.models, *self.memories)]

    def check(self, snapshot: Mapping[str, Tensor]) -> None:
        """Refuse a snapshot that does not fit."""
        live = self._live()
        wanted, came = ({n for n in names if n.partition(".")[0] not in self.optimizers} for names in (live, snapshot))
        if wanted != came:
            raise InvalidValueError(
                f"the state does not fit this method: {sorted(wanted - came)[:3]} missing, "
                f"{sorted(came - wanted)[:3]} unknown. Build the method with the model and options it was saved with"
            )
        shapes = {name: live[name].shape for name in self._fixed(live)} | {GENERATOR: live[GENERATOR].shape}
        for label, optimizer in self.optimizers.items():
            wanted_by = optimizers.shapes_for(optimizer, _below(snapshot, f"{label}."))
            shapes |= {f"{label}.{name}": shape for name, shape in wanted_by.items()}
        for name, shape in shapes.items():
            if shape != snapshot[name].shape:
                raise InvalidValueError(
                    f"the state does not fit this model: {name} is {tuple(snapshot[name].shape)} in it "
                    f"and {tuple(shape)} here"
                )
        for name in live.keys() & snapshot.keys():
            both = live[name].numel() and snapshot[name].numel()  # an empty memory has no type of its own
            if both and live[name].is_floating_point() != snapshot[name].is_floating_point():
                raise InvalidValueError(
                    f"the state does not fit this model: {name} is {snapshot[name].dtype} in it and "
                    f"{live[name].dtype} here"
                )


def learnt(before: Snapshot, after: Snapshot) -> bool:
    """Return whether anything was learnt: not the generator, what a predictor remembers or a stream's statistics."""
    lessons = [
        n for n in before if n.partition(".")[0] not in (MEMORY, STREAM) and n.rpartition(".")[2] not in FOLLOWED
    ]
    return before.keys() != after.keys() or _differ(before, after, lessons)


def moved(before: Snapshot, after: Snapshot) -> bool:
    """Return whether the state differs in more than the generator: something was learnt or noted."""
    return before.keys() != after.keys() or _differ(before, after, before)


def _differ(before: Snapshot, after: Snapshot, names: Iterable[str]) -> bool:
    return any(not torch.equal(before[name].cpu(), after[name].cpu()) for name in names if name != GENERATOR)


def _tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{label}.{name}": tensor
        for label, module in modules.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def _below(snapshot: Mapping[str, Tensor], prefix: str) -> Snapshot:
    return {name.removeprefix(prefix): tensor for name, tensor in snapshot.items() if name.startswith(prefix)}
