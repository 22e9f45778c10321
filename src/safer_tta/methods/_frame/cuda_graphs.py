"""Steps that the host does not wait for: the device itself finds an unhealthy batch, and its optimiser skips it.

For methods whose every step is the same program (`repeats`), on CUDA. In a compiled model, once a shape of batch has
come a few times, the whole step from the views onward is replayed as one CUDA graph.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._internal.optimizers import largest_gradient, step_unless
from ...predictors import Draw, Prediction
from .pace import paced
from .prefetch import Prefetch, empty_views, fetch
from .state import GENERATOR

if TYPE_CHECKING:
    from .method import Method

log = logging.getLogger("safer_tta")

EAGER = 3  # steps of a shape before it is captured; they choose its kernels, and a short last batch stays with them
MOST_GRAPHS = 4  # shapes worth the memory of a graph
MOST_FLAGS = 64  # batches after which their health is looked at
Key = tuple[torch.Size, int]


@dataclass(frozen=True)
class CapturedStep:
    """A step as a CUDA graph: it reads `views` and leaves its answer in `prediction`."""

    graph: torch.cuda.CUDAGraph
    views: Tensor
    prediction: Prediction
    unhealthy: Tensor

    def replay(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor]:
        draw.views(images, out=self.views, compile=True)
        self.graph.replay()
        return self.prediction.clone(pipelines=draw.names), self.unhealthy.clone()


class Accelerator:
    """Takes the steps of one method asynchronously, wherever that gives what the method's own steps give."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.prefetch = Prefetch(method)
        self.flags: list[Tensor] = []
        self.seen: Counter[Key] = Counter()
        self.graphs: dict[Key, CapturedStep] = {}
        self.built_on = (0, 0)

    @property
    def active(self) -> bool:
        """Whether it takes the steps: not on a CPU, and not while the method is frozen or guarded."""
        method = self.method
        return (
            method.repeats
            and method.predictor.repeats
            and not method.frozen
            and not method.watched
            and method.optimizer is not None
            and method.classifier.device.type == "cuda"
        )

    def adapt(self, images: Any) -> Prediction:
        """Predict a batch and learn from it. A batch that is refused changes nothing."""
        method, prepared = self.method, self.prefetch.take(images)
        with method.undo_on_failure() as held, method.classifier.tuned():
            if prepared is None:
                return self.step(*method.draw_batch(images))
            held[GENERATOR] = prepared.generator
            return self.step(prepared.images, prepared.draw)

    def stream(self, batches: Iterable[Tensor]) -> Iterator[Prediction]:
        """Adapt over batches, each prepared behind the step of the one before."""
        iterator = iter(batches)
        given, error = fetch(iterator)
        while given is not None:
            following, error = fetch(iterator)
            fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
            fetched.record()
            prediction = self.method(given)
            if following is not None and self.active:
                with self.method.exclusively():
                    self.prefetch.prepare(following, fetched)
            yield prediction
            given = following
        if error is not None:
            raise error

    def step(self, images: Tensor, draw: Draw) -> Prediction:
        """Predict and learn, without waiting for the device."""
        compile = self.method.classifier.compiled and images.is_cuda
        captured = self._captured(images, draw) if compile else None
        if captured is not None:
            prediction, unhealthy = captured.replay(images, draw)
        elif compile:  # as a graph will run: what it captures must have been compiled before
            views = draw.views(images, out=empty_views(self.method.classifier, images, draw), compile=True)
            prediction, unhealthy = self._step(views[0], draw.filled(views))
        else:
            prediction, unhealthy = self._step(images, draw)
        self.flags.append(unhealthy)
        if len(self.flags) > MOST_FLAGS:
            self.settle()
        return prediction

    def settle(self) -> None:
        """Wait for the device, and count the batches that were not learnt from."""
        if not self.flags:
            return
        count = int(torch.stack(self.flags).sum())
        self.flags.clear()
        if count:
            name = self.method.name
            self.method.refused["losses"] += count
            log.warning("%s: %d batch(es) gave no finite loss or gradients; answered but not learnt from", name, count)

    def _captured(self, images: Tensor, draw: Draw) -> CapturedStep | None:
        """Return the graph for batches of this shape, captured when it is due."""
        built_on = (self.method.state.generation, self.method.classifier.revision)
        if built_on != self.built_on:  # tensors were replaced; a graph would use the old ones
            self.graphs.clear()
            self.built_on = built_on
        key = (images.shape, len(draw.pipelines))
        if key not in self.graphs and self.seen[key] >= EAGER and len(self.graphs) < MOST_GRAPHS:
            self.graphs[key] = self._capture(images, draw)
        self.seen[key] += 1
        return self.graphs.get(key)

    def _capture(self, images: Tensor, draw: Draw) -> CapturedStep:
        views = empty_views(self.method.classifier, images, draw)
        draw.views(images, out=views)
        graph = torch.cuda.CUDAGraph()
        # Only this thread is watched: others may allocate meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            prediction, unhealthy = self._step(views[0], draw.filled(views))
        return CapturedStep(graph, views, prediction, unhealthy)

    def _step(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor]:
        """Predict and learn without looking at the result; (prediction, whether something was not finite)."""
        method = self.method
        assert method.optimizer is not None
        before = method.state.hold_statistics()
        step = method.look(images, draw)
        assert step.loss is not None
        step.loss.backward()  # type: ignore[no-untyped-call]
        unhealthy = ~torch.isfinite(step.loss.detach()) | ~torch.isfinite(largest_gradient(method.optimizer))
        skipped = unhealthy if method.statistics is None else unhealthy | ~method.statistics.diverse()
        with paced(method.optimizer, method.statistics, len(images)):
            step_unless(skipped, method.optimizer)
        with torch.no_grad():
            method.remember(step)
            for name, buffer in method.state.statistics().items():
                buffer.copy_(torch.where(unhealthy, before[name], buffer))
        method.optimizer.zero_grad()
        return step.prediction.detach(), unhealthy
