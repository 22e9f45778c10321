"""One step for batches of several streams at once, each with a state of its own.

Streams share the model but for what adapts: scale and shift of its norms, statistics, the optimiser's memory. So the
views of all streams pass through it together, and every layer that differs keeps the streams apart. A step gives every
stream what `Method.__call__` would have given it alone, up to rounding: a convolution of another number of images may
add in another order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam

from ..._internal.optimizers import fuse
from ...errors import InvalidValueError
from ...models.side_by_side import SideBySide
from ...predictors import Draw, Prediction, map_tensors, tensors_of
from .method import Method
from .pace import paced
from .rows import STEP, Layout, Row
from .state import MEMORY, STREAM, Snapshot

log = logging.getLogger("safer_tta")


@dataclass(frozen=True)
class Taken:
    """What a step gave one stream.

    Attributes:
        prediction: The answer, on the CPU.
        state: The state of the stream afterwards.
        refused: What was not finite and therefore not learnt from: "losses", "gradients" or nothing.
        finite: Whether every number of the state is finite.
    """

    prediction: Prediction
    state: Snapshot
    refused: str
    finite: bool


class Noted(NamedTuple):
    """What streams have noted, (G,N) of each precision; and the part of it that the predictor remembers, (G,·)."""

    stacked: dict[torch.dtype, Tensor]
    memory: Tensor | None


class Seen(NamedTuple):
    """What a pass shows: the answers to all streams, (G,...), what the predictor will remember, and losses, (G,)."""

    answer: Prediction
    memory: Tensor | None
    losses: Tensor | None


class Lockstep:
    """Takes steps of one method for several streams at once, without touching the state that is in the method.

    Raises:
        InvalidValueError: If the method cannot do so.
    """

    def __init__(self, method: Method) -> None:
        _check(method)
        self.method = method
        self.layout = Layout(method)
        self.model = SideBySide(method.classifier)
        self.predictor = method.predictor.fork(self.model.classifier, seed=0)  # with a generator of its own
        self.statistics = self.model.classifier.statistics

    def agrees(self, side: int) -> bool:
        """Whether the model keeps streams apart and finds their features; tried with random images of this side."""
        row, classifier = self.layout.row(self.method.state_dict()), self.method.classifier
        with self.method.exclusively():
            try:
                self._put([row, row], [row.weights.to(classifier.device)] * 2, images=4)
                return self.model.agrees_with(classifier, side)
            except (RuntimeError, ValueError):  # a layer that cannot handle scale and shift of several streams
                log.info("the model does not take several streams at once", exc_info=True)
                return False

    def step(self, states: Sequence[Mapping[str, Tensor]], images: Tensor, *, learn: bool = True) -> list[Taken]:
        """Predict a batch of each stream, and learn from each by itself.

        Args:
            states: The state of every stream, which is left as it is.
            images: A batch for every stream, (G,B,3,H,W), floats in [0,1] or uint8.
            learn: Whether they learn.
        """
        classifier = self.model.classifier
        how = contextlib.nullcontext() if learn else classifier.untracked()
        with self.method.exclusively(), torch.set_grad_enabled(learn), classifier.tuned(), how:
            rows, draws = zip(*map(self._draw, map(self.layout.row, states), images), strict=True)
            weights = [nn.Parameter(row.weights.to(classifier.device, copy=True), learn) for row in rows]
            noted = self._put(rows, weights, images=images.shape[0] * images.shape[1] * (1 + len(draws[0].pipelines)))
            seen = self._look(self.predictor.to_model(images), draws, noted.memory)
            after, refused = self._learn(rows, weights, noted, seen) if learn else (rows, [""] * len(rows))
            answers = map_tensors(seen.answer, lambda tensor: tensor.detach().cpu())
            return [
                Taken(_of_one(answers, g, draw), self.layout.state(row), why, row.finite())
                for g, (row, draw, why) in enumerate(zip(after, draws, refused, strict=True))
            ]

    def _draw(self, row: Row, images: Tensor) -> tuple[Row, Draw]:
        """Draw for a batch of a stream; images that are not a batch are refused."""
        generator = self.predictor.generator.set_state(row.generator)
        draw = self.predictor.draw(images)
        return dataclasses.replace(row, generator=generator.get_state()), draw

    def _put(self, rows: Sequence[Row], weights: Sequence[Tensor], images: int) -> Noted:
        """Put the state of all streams into the model; what the pass notes is written to what is returned."""
        device = self.model.classifier.device
        stacked = {dtype: torch.stack([row.noted[dtype].to(device) for row in rows]) for dtype in self.layout.noted}
        parts = self.layout.weights_of(torch.stack([*weights]))
        for dtype, tensor in stacked.items():
            parts |= self.layout.noted_of(tensor, dtype)
        memory = parts.pop(f"{MEMORY}.seen", None)
        window = f"{STREAM}."
        named = {
            name.replace(window, "statistics.window.") if name.startswith(window) else name: t
            for name, t in parts.items()
        }
        self.model.put(named, len(rows), images)
        return Noted(stacked, memory)

    def _look(self, images: Tensor, draws: Sequence[Draw], memory: Tensor | None) -> Seen:
        """Pass the views of all streams through the model together, and conclude for each stream by itself."""
        classifier = self.model.classifier
        if self.statistics is not None:
            self.statistics.open()
        views = self.predictor.make_all_views(images, draws)
        with classifier.looking():
            passed = self.predictor.pass_views(views.flatten(1, 2))
        features, logits = (torch.unflatten(tensor, 0, views.shape[:3]).movedim(2, 0) for tensor in passed)
        answers: list[Prediction] = []

        def conclude(features: Tensor, logits: Tensor, memory: Tensor | None) -> tuple[list[Tensor], dict[str, Tensor]]:
            shown = self.predictor.conclude(features, logits, memory)
            answers.append(shown.answer)
            more = {"memory": shown.memory, "losses": self.method.objective(shown)}
            return tensors_of(shown.answer), {name: tensor for name, tensor in more.items() if tensor is not None}

        parts, more = torch.vmap(conclude, in_dims=(0, 0, None if memory is None else 0))(features, logits, memory)
        left = iter(parts)
        return Seen(map_tensors(answers[0], lambda _: next(left)), more.get("memory"), more.get("losses"))

    def _learn(
        self, rows: Sequence[Row], weights: Sequence[nn.Parameter], noted: Noted, seen: Seen
    ) -> tuple[list[Row], list[str]]:
        """Take the steps; return the rows afterwards, and what each stream refused to learn from."""
        healthy, teaches = self._judge(seen)
        refused = ["" if fine else "losses" for fine in healthy]
        if seen.losses is not None and any(teaches):
            lessons = [loss for loss, t in zip(seen.losses, teaches, strict=True) if t]
            torch.stack(lessons).sum().backward()  # type: ignore[no-untyped-call]
            finite = torch.isfinite(torch.stack([_gradient(weight) for weight in weights])).all(dim=1).tolist()
            refused = ["gradients" if t and not f else why for why, t, f in zip(refused, teaches, finite, strict=True)]
        steps = [t and not why for t, why in zip(teaches, refused, strict=True)]
        memories = self._optimise(rows, weights, steps, seen.answer.probs.shape[1])
        with torch.no_grad():
            if noted.memory is not None and seen.memory is not None:
                noted.memory.copy_(torch.where(torch.isfinite(seen.memory), seen.memory, noted.memory))
            if self.statistics is not None:
                self.statistics.commit()
        stacked = {dtype: tensor.cpu() for dtype, tensor in noted.stacked.items()}
        after = []
        for g, (row, why) in enumerate(zip(rows, refused, strict=True)):
            if why:
                log.warning("%s: a batch gives no finite %s; it is answered but not learnt from", self.method.name, why)
                after.append(row)
                continue
            own = {dtype: tensor[g].clone() for dtype, tensor in stacked.items()}  # no stream keeps those of others
            after.append(Row(weights[g].detach().cpu(), memories[g], own, row.generator))
        return after, refused

    def _judge(self, seen: Seen) -> tuple[list[bool], list[bool]]:
        """Return for each stream whether its batch is finite, and whether there is something to learn from it."""
        totals = seen.answer.probs.detach().sum(dim=(1, 2))
        teaches = torch.full_like(totals, seen.losses is not None, dtype=torch.bool)
        if self.statistics is not None:
            teaches &= self.statistics.diverse()
        figures = totals if seen.losses is None else torch.where(teaches, seen.losses.detach(), totals)
        healthy, teaches = torch.stack([torch.isfinite(figures), teaches & torch.isfinite(figures)])
        return healthy.tolist(), teaches.tolist()

    def _optimise(
        self, rows: Sequence[Row], weights: Sequence[nn.Parameter], steps: Sequence[bool], images: int
    ) -> list[Mapping[str, Tensor]]:
        """Let those streams take a step that may; return what the optimiser remembers of each."""
        if not any(steps):
            return [row.moments for row in rows]
        optimizer = self.method.build_optimizer([*weights])
        fused = weights[0].is_cuda
        fuse(optimizer, fused)
        for weight, row, step in zip(weights, rows, steps, strict=True):
            weight.grad = weight.grad if step else None
            for key, tensor in row.moments.items():
                where = weight.device if fused or key != STEP else torch.device("cpu")
                optimizer.state[weight][key] = tensor.to(where, copy=True)
        with paced(optimizer, self.statistics, images):
            optimizer.step()
        return [{key: tensor.cpu() for key, tensor in optimizer.state[weight].items()} for weight in weights]


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _of_one(answers: Prediction, place: int, draw: Draw) -> Prediction:
    """Return the answer to one stream, in tensors of its own."""
    return map_tensors(answers, lambda tensor: tensor[place]).clone(pipelines=draw.names)


def _check(method: Method) -> None:
    """Refuse a method whose steps cannot be taken together."""
    own = [
        name
        for name in ("forward", "optimise", "commit", "draw")
        if getattr(type(method), name) is not getattr(Method, name)
    ]
    state, optimizer = method.state, method.optimizer
    problem = (
        f"it has its own {own[0]}()" if own
        else "it keeps memories or models of its own" if state.memory or state.models
        else f"it updates {method.updates}" if method.updates not in ("none", "norm")
        else f"it learns with {type(optimizer).__name__}" if not isinstance(optimizer, (Adam, type(None)))
        else "its predictor cannot take several streams at once" if not method.predictor.joins
        else "its model is compiled" if method.classifier.compiled
        else ""
    )  # fmt: skip
    if problem:
        raise InvalidValueError(f"{method.name} takes no steps for several streams at once: {problem}")
