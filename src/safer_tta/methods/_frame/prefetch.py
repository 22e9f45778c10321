"""The views of the next batch, made on a second CUDA stream while this batch is learnt from.

Views do not depend on the model, so they may be made early, but the generator must not show it: any other use of the
method finds it as it was before the early draw, and the batch is drawn again when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...models import Classifier
from ...predictors import Draw

if TYPE_CHECKING:
    from .method import Method


@dataclass(frozen=True)
class Prepared:
    """A batch that was drawn early."""

    given: Tensor  # the batch as the user passed it
    images: Tensor  # the same, ready for the model
    draw: Draw  # its draw, with the views already made
    generator: Tensor  # the state of the generator before the draw
    ready: torch.cuda.Event  # happens when the views are complete


class Prefetch:
    """At most one prepared batch of a method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.prepared: Prepared | None = None
        self._side: torch.cuda.Stream | None = None

    def prepare(self, given: Any, after: torch.cuda.Event) -> None:
        """Draw a batch and make its views once `after` has happened. A batch that cannot be drawn fails in its turn."""
        method = self.method
        self._side = self._side or torch.cuda.Stream(method.classifier.device)  # type: ignore[no-untyped-call]
        before = method.predictor.generator.get_state()
        try:
            with torch.cuda.stream(self._side):
                self._side.wait_event(after)
                images, draw = method.draw_batch(given)
                views = empty_views(method.classifier, images, draw)
                filled = draw.filled(draw.views(images, out=views, compile=method.classifier.compiled))
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record()
        except Exception:
            method.predictor.generator.set_state(before)
            return
        self.prepared = Prepared(given, images, filled, before, ready)

    def take(self, given: Any) -> Prepared | None:
        """Return the prepared batch if it is this one; undo the draw of any other."""
        prepared = self.prepared
        if prepared is None or prepared.given is not given:
            self.undo()
            return None
        self.prepared = None
        here = torch.cuda.current_stream(prepared.images.device)
        here.wait_event(prepared.ready)
        for tensor in (prepared.images, prepared.draw.views(prepared.images)):
            tensor.record_stream(here)
        return prepared

    def undo(self) -> None:
        """Drop the prepared batch as if nothing had been drawn early."""
        if self.prepared is not None:
            self.method.predictor.generator.set_state(self.prepared.generator)
            self.prepared = None


def fetch(batches: Iterator[Tensor]) -> tuple[Tensor | None, Exception | None]:
    """Return the next batch; an error of the source is kept until the batches before it have been answered."""
    try:
        return next(batches), None
    except StopIteration:
        return None, None
    except Exception as error:
        return None, error


def empty_views(classifier: Classifier, images: Tensor, draw: Draw) -> Tensor:
    """Return a tensor for all views. Before a pass in bfloat16 half precision is enough: for values in [0,1] it errs by
    an eighth of an 8-bit step, and moves half the memory."""
    half = classifier.compiled and classifier.precision == "bfloat16"
    return images.new_empty(1 + len(draw.pipelines), *images.shape, dtype=torch.float16 if half else images.dtype)
