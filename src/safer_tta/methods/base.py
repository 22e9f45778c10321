"""The frame of every test-time adaptation method: validate → draw → forward → finite check → optimise → commit."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ..models.classifier import Updates
from ..optimizers import finite_gradients
from ..predictors import Prediction, Predictor
from . import ahead
from .cost import Cost
from .state import GENERATOR, PREDICTOR, Snapshot, State
from .stateful import Stateful, alone
from .unattended import Unattended

log = logging.getLogger("safer_tta")

Closure = Callable[[], Tensor | None]


class NotFiniteError(RuntimeError):
    """A gradient that is not finite, found before the optimiser could use it."""


def checked_lr(lr: float | None) -> float:
    if lr is None or not 0 < lr < float("inf"):
        raise ValueError(f"lr is {lr}; expected a positive learning rate")
    return lr


class Method(Stateful):
    """Adapts the classifier behind a predictor, one batch at a time. A method file says what is particular:

    updates    which parameters learn: "none", "norm" (scale and shift), "features" (all but the head), "all"
    prepare()  replace norms, build memories (self.state.memory) and teachers; the optimiser comes after
    forward()  (prediction, loss), loss None for "learn nothing from this batch"; writes nothing, may be called twice
    optimise() one optimiser step by default; sharpness-aware methods call the closure twice
    again()    the loss of a second pass on the same views, where optimise() asks for one
    commit()   after a healthy step only: averages, memories, restores; may learn() a second time
    by_predictor  whether the answer is the predictor's own, without a teacher, prototypes or an average over copies
    repeats    every step is the same program: a loss each time, nothing read back, no optimise() or commit() of its own
    """

    name: ClassVar[str]
    updates: ClassVar[Updates] = "none"
    cost: ClassVar[Cost] = Cost(1, 1)
    by_predictor: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    def __init__(self, predictor: Predictor, *, lr: float | None = None) -> None:
        super().__init__()
        self.predictor = predictor
        self.classifier = predictor.classifier
        self.frozen = False
        self.watched = False  # by a guard, which looks at every answer
        self._refused: Counter[str] = Counter()
        self._unattended, self.ahead = Unattended(), ahead.Ahead()
        self.classifier.eval().requires_grad_(False)
        self.state = State(self.classifier, predictor.generator)
        if isinstance(predictor.memory, nn.Module):
            self.state.models[PREDICTOR] = predictor.memory
        self.prepare()
        parameters = self._learning()
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.optimizer: Optimizer | None = None
        if parameters:
            self.optimizer = self.state.optimizers["optimizer"] = self.build_optimizer(parameters, lr)
        if self.classifier.device.type == "cuda":
            self.state.to(self.classifier.device)  # a model that is there already has the optimisers of a GPU, too
        self.state.declare_adapted()
        self._initial = self.state.snapshot()

    # --- what a method file may fill in -------------------------------------------------------------------------

    def prepare(self) -> None: ...

    def forward(self, images: Tensor, draw: Any) -> tuple[Prediction, Tensor | None]:
        raise NotImplementedError

    def build_optimizer(self, parameters: list[nn.Parameter], lr: float | None) -> Optimizer:
        return Adam(parameters, lr=checked_lr(lr))

    def optimise(self, closure: Closure) -> None:
        closure()
        assert self.optimizer is not None
        self.optimizer.step()

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `predictor` is the network that answers: what an attacker who knows the method attacks."""
        return contextlib.nullcontext()

    def draw(self, images: Tensor) -> Any:
        """Everything random about a batch; a method with views of its own draws them here too."""
        return self.predictor.draw(images)

    def again(self, images: Tensor, draw: Any, prediction: Prediction) -> Tensor | None:
        return self.forward(images, draw)[1]

    def commit(self, images: Tensor, prediction: Prediction) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss, for whichever optimiser steps next. Those that are not finite are forgotten, and the
        update with them: the frame counts it."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not all(map(finite_gradients, self.state.optimizers.values())):
            self._forget_gradients()
            raise NotFiniteError("a gradient is not finite; the step was not taken")

    def learn(self, loss: Callable[[], Tensor | None]) -> None:
        """One more update, from within commit: `loss` is called once for every gradient that optimise() wants. An
        update that cannot be made leaves nothing behind, and what was learnt before it stands."""
        held = self.state.hold()
        with torch.enable_grad():
            value = loss()
            if value is not None and not self._healthy(value.detach()):
                self.state.put_back(held, generator=False)
            elif value is not None:
                try:
                    self.optimise(self._closure(value, loss))
                except NotFiniteError:
                    self._refused["gradients"] += 1
                    self.state.put_back(held, generator=False)
                self._forget_gradients()

    # --- what a user calls --------------------------------------------------------------------------------------

    @alone(drawn_ahead=True)
    def __call__(self, images: Tensor) -> Prediction:
        """Predict a batch as it arrives, then learn from it. A batch that is refused, or fails on the way to the
        optimiser's step, changes nothing."""
        prepared = self.ahead.take(images)
        if prepared is None:
            self.undraw()
        with torch.enable_grad():
            held = self.state.hold()
            if prepared is not None:
                held[GENERATOR] = prepared.generator
            try:
                ready, draw = (prepared.images, prepared.draw) if prepared else self._drawn(_own(images))
                return self._step(ready, draw, held)
            except BaseException:
                self.state.put_back(held)
                self._forget_gradients()
                raise

    @alone
    def predict(self, images: Tensor) -> Prediction:
        """The same answer without learning, and without moving anything: not even the generator."""
        held = self.state.hold()
        try:
            return self._answer(*self._drawn(images))
        finally:
            self.state.put_back(held)

    def stream(self, batches: Iterable[Any], *, prefetch: bool = True) -> Iterator[Prediction]:
        """Adapt over batches of images, or of (images, ...) as a DataLoader gives them.

        prefetch: on CUDA, take the next batch before this one's answer is handed out, and make its views meanwhile.
            False for live sources, where an answer must not wait for the next batch to come.
        """
        images = (batch[0] if isinstance(batch, (tuple, list)) else batch for batch in batches)
        return ahead.stream(self, images) if prefetch and self.unattended() else map(self, images)

    def freeze(self) -> Self:
        """From now on predict only. Views are still drawn afresh."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        self.frozen = False
        return self

    @property
    def refused(self) -> Counter[str]:
        """How many losses and gradients were not learnt from, as they were not finite. Waits for the device."""
        self._unattended.settle(self)
        return self._refused

    def unattended(self) -> bool:
        """Whether steps run on the device without anybody waiting for them: not while frozen or guarded."""
        return (
            self.repeats
            and self.predictor.repeats
            and not self.frozen
            and not self.watched
            and self.optimizer is not None
            and self.classifier.device.type == "cuda"
        )

    def undraw(self) -> None:
        self.ahead.undo(self)

    # --- the frame ----------------------------------------------------------------------------------------------

    def _drawn(self, images: Any) -> tuple[Tensor, Any]:
        draw = self.draw(images)
        return self.predictor.to_model(images), draw

    def _step(self, images: Tensor, draw: Any, held: Snapshot) -> Prediction:
        if self.frozen:
            return self._answer(images, draw)
        with self.classifier.tuned():
            return self._unattended.step(self, images, draw) if self.unattended() else self._watched(images, draw, held)

    def _watched(self, images: Tensor, draw: Any, held: Snapshot) -> Prediction:
        prediction, loss = self.forward(images, draw)
        if not self._healthy(prediction.probs.detach().sum() if loss is None else loss.detach()):
            self.state.put_back(held, generator=False)
            return prediction.answered().detach()
        if loss is not None:
            try:
                self.optimise(self._closure(loss, lambda: self.again(images, draw, prediction)))
            except NotFiniteError:
                self._refused["gradients"] += 1
                self.state.put_back(held, generator=False)
                return prediction.answered().detach()
            finally:
                self._forget_gradients()
        with torch.no_grad():
            self.predictor.remember(prediction)  # before a commit that may restore everything, this too
            try:
                self.commit(images, prediction.taught().detach())
            except NotFiniteError:  # of a second update: it is left out, and what was learnt before it stands
                self._refused["gradients"] += 1
        return prediction.answered().detach()

    def _healthy(self, figure: Tensor) -> bool:
        finite = bool(torch.isfinite(figure))
        if not finite:
            self._refused["losses"] += 1
            log.warning("%s: the batch gives %s; it is answered but not learnt from", self.name, figure.item())
        return finite

    def _forget_gradients(self) -> None:
        for optimizer in self.state.optimizers.values():
            optimizer.zero_grad()

    def _answer(self, images: Tensor, draw: Any) -> Prediction:
        with torch.no_grad(), self.classifier.untracked():
            return self.forward(images, draw)[0].answered().detach()

    def _closure(self, loss: Tensor, again: Callable[[], Tensor | None]) -> Closure:
        """Gradients of a loss: at first of the one already computed, after that of a fresh pass."""
        computed = [loss]

        def closure() -> Tensor | None:
            self._forget_gradients()
            if computed:
                value: Tensor | None = computed.pop()
            else:
                with self.classifier.untracked():
                    value = again()
            if value is not None:
                self.backward(value)
            return value

        return closure

    def _learning(self) -> list[nn.Parameter]:
        parameters = self.classifier.learning(self.updates)
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
            raise ValueError(
                f"the model is {parameters[0].dtype}, in which the small steps of {self.name} round to nothing; "
                "expected float32: model.float()"
            )
        if self.updates == "norm" and not parameters:
            raise ValueError(
                f"{self.name} updates the scale and shift of normalisation layers and the model has none; "
                "expected BatchNorm, LayerNorm, GroupNorm, InstanceNorm or RMSNorm with affine parameters. "
                "Use a method that updates other parameters, such as 'pl'"
            )
        return parameters


def _own(images: Any) -> Any:
    """Images without the caller's graph: learning from a batch must not reach back into what made it. A tensor made
    under inference mode cannot take part in a backward pass; its copy can."""
    if not isinstance(images, Tensor):
        return images
    return images.clone() if images.is_inference() else images.detach()
