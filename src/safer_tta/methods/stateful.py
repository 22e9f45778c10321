"""What every method can do with its declared state: reset, restore, save, load, move, export.

One thread at a time: adapting, predicting and loading take turns, so a method may be shared by threads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, overload

import torch
from torch import Tensor, nn

from ..models import Classifier
from . import state as states
from .state import Snapshot, State

S = TypeVar("S", bound="Stateful")
P = ParamSpec("P")
T = TypeVar("T")


Inner = Callable[Concatenate[S, P], T]


@overload
def alone(function: Inner[S, P, T]) -> Inner[S, P, T]: ...


@overload
def alone(*, drawn_ahead: bool) -> Callable[[Inner[S, P, T]], Inner[S, P, T]]: ...


def alone(function: Any = None, *, drawn_ahead: bool = False) -> Any:
    """Run with the method to itself. A batch that was drawn ahead is undrawn first, unless the function knows what to
    do with it."""
    if function is None:
        return functools.partial(alone, drawn_ahead=drawn_ahead)

    @functools.wraps(function)
    def run(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        with self.to_myself():
            if not drawn_ahead:
                self.undraw()
            return function(self, *arguments, **keywords)

    return run


class _Lock:
    """A lock that a copy of its owner does not share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lock:
        return _Lock()


class Stateful:
    name: ClassVar[str]
    classifier: Classifier
    state: State
    _initial: Snapshot

    def __init__(self) -> None:
        self._lock = _Lock()

    def undraw(self) -> None: ...

    @contextlib.contextmanager
    def to_myself(self) -> Iterator[None]:
        """Inside, no other thread adapts, predicts or loads; and no inference mode of the caller holds, as what is made
        here must train."""
        with self._lock.lock, torch.inference_mode(False):
            yield

    @alone
    def reset(self) -> None:
        """Back to the very start, generator included: the same stream gives the same answers again."""
        self.state.load(self._initial)

    @alone
    def restore(self) -> None:
        """Weights, optimiser and memories back to the start; the generator runs on."""
        self.state.load(self._initial, generator=False)

    @property
    def state_bytes(self) -> int:
        """How much memory the adapted state takes."""
        return self.state.nbytes

    @alone
    def state_dict(self) -> Snapshot:
        return self.state.snapshot()

    @alone
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        self.state.load(snapshot)

    @alone
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted state as safetensors. The source model is not in it."""
        states.write(path, self.state.snapshot(), method=self.name, source=self._source)

    @alone
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Continue from a saved state, bit for bit, with the same source model and options."""
        self.load_state_dict(states.read(path, method=self.name, source=self._source))
        return self

    @alone
    def to(self, device: torch.device | str) -> Self:
        self.classifier.to(device)
        self.state.to(torch.device(device))
        return self

    @alone
    def export(self) -> nn.Module:
        """The adapted model on its own, in eval mode. It takes what the original model took: normalised images. Methods
        that answer with more than the model (a teacher, prototypes: cotta, rotta, t3a) leave that behind.

        After a method that drops the running statistics (Tent) its batch norms use each batch's own, in eval mode too;
        after one that keeps them (BN, PL) they use the running ones, as any model does in eval mode.
        """
        return copy.deepcopy(self.classifier.model).eval().requires_grad_(True)

    @functools.cached_property
    def _source(self) -> str:
        return self.state.fingerprint(self._initial)
