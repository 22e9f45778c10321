"""The views of the next batch, made on a second CUDA stream while this one is learnt from.

Views do not depend on the model, so they may be early; the generator must not be. Whoever looks at a method while a
batch lies prepared finds the generator as it was before that batch was drawn, and the batch is drawn again in its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..predictors import Draw, Prediction
from .unattended import room_for_views

if TYPE_CHECKING:
    from .base import Method


@dataclass(frozen=True)
class Prepared:
    given: Tensor  # as the user handed it over
    images: Tensor  # as the model wants it
    draw: Draw
    generator: Tensor  # its state before the draw
    ready: torch.cuda.Event


class Ahead:
    """At most one batch, prepared. A copy of its method has none."""

    def __init__(self) -> None:
        self.prepared: Prepared | None = None
        self._side: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        return Ahead()

    def prepare(self, method: Method, given: Any, after: torch.cuda.Event) -> None:
        """Draw a batch and make its views once `after` has happened. What cannot be drawn is left to its turn, which
        will say why."""
        device = method.classifier.device
        self._side = self._side or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        before = method.predictor.generator.get_state()
        try:
            with torch.cuda.stream(self._side):
                self._side.wait_event(after)
                draw = method.draw(given)
                images = method.predictor.to_model(given)
                views = room_for_views(method, images, draw)
                filled = draw.filled(draw.views(images, out=views, compile=method.classifier.compiled))
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record()
        except Exception:
            method.predictor.generator.set_state(before)
            return
        self.prepared = Prepared(given, images, filled, before, ready)

    def take(self, given: Any) -> Prepared | None:
        """What was prepared, if this is the batch it was prepared for."""
        prepared = self.prepared
        if prepared is None or prepared.given is not given:
            return None
        self.prepared = None
        here = torch.cuda.current_stream(prepared.images.device)
        here.wait_event(prepared.ready)
        for tensor in (prepared.images, prepared.draw.views(prepared.images)):
            tensor.record_stream(here)
        return prepared

    def undo(self, method: Method) -> None:
        """As if nothing had been drawn early."""
        if self.prepared is not None:
            method.predictor.generator.set_state(self.prepared.generator)
            self.prepared = None


def stream(method: Method, batches: Iterable[Tensor]) -> Iterator[Prediction]:
    """Each batch in its turn, the next one prepared behind its step."""
    iterator = iter(batches)
    given, error = _next(iterator)
    while given is not None:
        following, error = _next(iterator)
        fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        fetched.record()
        prediction = method(given)
        if following is not None and method.unattended():
            with method.to_myself():
                method.ahead.prepare(method, following, fetched)
        yield prediction
        given = following
    if error is not None:
        raise error


def _next(iterator: Iterator[Tensor]) -> tuple[Tensor | None, Exception | None]:
    """The next batch; an error of the source is kept until the batches before it have been answered."""
    try:
        return next(iterator), None
    except StopIteration:
        return None, None
    except Exception as error:
        return None, error
