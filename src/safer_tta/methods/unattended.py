"""Steps that nobody waits for: the device itself finds an unhealthy batch, and its optimiser skips it.

For methods whose every step is the same program (`repeats`), on CUDA. In a compiled model, once a shape of batch has
come a few times, the whole step from the filled views onward is replayed as one CUDA graph.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optimizers import largest_gradient
from ..predictors import Draw, Prediction

if TYPE_CHECKING:
    from .base import Method

log = logging.getLogger("safer_tta")

EAGER = 3  # steps of a shape before it is captured: they choose its kernels, and a short last batch stays with them
MOST_GRAPHS = 4  # shapes worth the memory of a graph
MOST_FLAGS = 64  # batches after which their health is looked at, whether somebody asks or not
Key = tuple[torch.Size, int]


@dataclass(frozen=True)
class Captured:
    """A step as a CUDA graph: it reads `views` and leaves its answer in `prediction`."""

    graph: torch.cuda.CUDAGraph
    views: Tensor
    prediction: Prediction
    unhealthy: Tensor

    def replay(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor]:
        draw.views(images, out=self.views, compile=True)
        self.graph.replay()
        return self.prediction.copied(pipelines=draw.names), self.unhealthy.clone()


@dataclass
class Unattended:
    """The unattended steps of one method. A copy of the method starts with none."""

    flags: list[Tensor] = field(default_factory=list)
    seen: Counter[Key] = field(default_factory=Counter)
    graphs: dict[Key, Captured] = field(default_factory=dict)
    built_on: tuple[int, int] = (0, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unattended:
        return Unattended()

    def step(self, method: Method, images: Tensor, draw: Draw) -> Prediction:
        compile = method.classifier.compiled and images.is_cuda
        captured = self._captured(method, images, draw) if compile else None
        if captured is not None:
            prediction, unhealthy = captured.replay(images, draw)
        elif compile:  # as a graph will: what it captures must have been compiled before
            views = draw.views(images, out=room_for_views(method, images, draw), compile=True)
            prediction, unhealthy = _step(method, views[0], draw.filled(views))
        else:
            prediction, unhealthy = _step(method, images, draw)
        self.flags.append(unhealthy)
        if len(self.flags) > MOST_FLAGS:
            self.settle(method)
        return prediction

    def settle(self, method: Method) -> None:
        """Wait, and count the batches that were not learnt from."""
        if self.flags:
            count = int(torch.stack(self.flags).sum())
            self.flags.clear()
            if count:
                method._refused["losses"] += count
                log.warning(
                    "%s: %d batch(es) gave no finite loss or gradients; answered but not learnt from",
                    method.name,
                    count,
                )

    def _captured(self, method: Method, images: Tensor, draw: Draw) -> Captured | None:
        """The graph for batches like this one, made when it is due."""
        built_on = (method.state.generation, method.classifier.revision)
        if built_on != self.built_on:  # tensors were replaced; a graph would go on with the old ones
            self.graphs.clear()
            self.built_on = built_on
        key = (images.shape, len(draw.pipelines))
        if key not in self.graphs and self.seen[key] >= EAGER and len(self.graphs) < MOST_GRAPHS:
            self.graphs[key] = _capture(method, images, draw)
        self.seen[key] += 1
        return self.graphs.get(key)


def _step(method: Method, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor]:
    """Predict and learn without a look at the result; (prediction, whether loss or gradients were not finite)."""
    assert method.optimizer is not None
    before = method.state.hold_statistics()
    prediction, loss = method.forward(images, draw)
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    unhealthy = ~torch.isfinite(loss.detach()) | ~torch.isfinite(largest_gradient(method.optimizer))
    skipping_step(method.optimizer, unhealthy)
    with torch.no_grad():
        method.predictor.remember(prediction)
        for name, buffer in method.state.statistics().items():
            buffer.copy_(torch.where(unhealthy, before[name], buffer))
    method.optimizer.zero_grad()
    return prediction.answered().detach(), unhealthy


def skipping_step(optimizer: Optimizer, skip: Tensor) -> None:
    """A step of a fused optimiser, or none where `skip` says so: torch's own way for gradients that overflowed."""
    given: Any = optimizer
    given.found_inf, given.grad_scale = skip.float(), None
    try:
        optimizer.step()
    finally:
        del given.found_inf, given.grad_scale


def room_for_views(method: Method, images: Tensor, draw: Draw) -> Tensor:
    """A tensor for all views. Before a pass in bfloat16 half precision is plenty, for values in [0,1] an eighth of an
    eight-bit step, and half the memory to move."""
    half = method.classifier.compiled and method.classifier.precision == "bfloat16"
    return images.new_empty(1 + len(draw.pipelines), *images.shape, dtype=torch.float16 if half else images.dtype)


def _capture(method: Method, images: Tensor, draw: Draw) -> Captured:
    views = room_for_views(method, images, draw)
    draw.views(images, out=views)
    graph = torch.cuda.CUDAGraph()
    # Only this thread is watched: others may go on allocating meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        prediction, unhealthy = _step(method, views[0], draw.filled(views))
    return Captured(graph, views, prediction, unhealthy)
