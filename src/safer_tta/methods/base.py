"""The frame of every test-time adaptation method: validate → draw → forward → finite check → optimise → commit."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ..models.classifier import Updates
from ..predictors import Draw, Prediction, Predictor
from . import state as states
from .state import Snapshot, State

log = logging.getLogger("safer_tta")

Closure = Callable[[], Tensor]


class Method:
    """Adapts the classifier behind a predictor, one batch at a time. A method file says what is particular:

    updates    which parameters learn: "none", "norm" (scale and shift), "features" (all but the head), "all"
    prepare()  replace norms, build memories (self.state.memory) and teachers; the optimiser comes after
    forward()  (prediction, loss), loss None for "learn nothing from this batch"; writes nothing, may be called twice
    optimise() one optimiser step by default; sharpness-aware methods call the closure twice
    commit()   after a healthy step only: averages, memories, restores
    """

    name: ClassVar[str]
    updates: ClassVar[Updates] = "none"

    def __init__(self, predictor: Predictor, *, lr: float | None = None) -> None:
        self.predictor = predictor
        self.classifier = predictor.classifier
        self.frozen = False
        self.classifier.eval().requires_grad_(False)
        self.state = State(self.classifier.model, predictor.generator)
        self.prepare()
        parameters = self._learning()
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.optimizer: Optimizer | None = None
        if parameters:
            self.optimizer = self.state.optimizers["optimizer"] = self.build_optimizer(parameters, lr)
        self.state.declare_adapted()
        self._initial = self.state.snapshot()

    # --- what a method file may fill in -------------------------------------------------------------------------

    def prepare(self) -> None: ...

    def forward(self, images: Tensor, draw: Draw) -> tuple[Prediction, Tensor | None]:
        raise NotImplementedError

    def build_optimizer(self, parameters: list[nn.Parameter], lr: float | None) -> Optimizer:
        if lr is None or not lr > 0:
            raise ValueError(f"lr is {lr}; expected a positive learning rate")
        return Adam(parameters, lr=lr)

    def optimise(self, closure: Closure) -> None:
        closure()
        assert self.optimizer is not None
        self.optimizer.step()

    def commit(self, prediction: Prediction) -> None: ...

    # --- what a user calls --------------------------------------------------------------------------------------

    def __call__(self, images: Tensor) -> Prediction:
        """Predict a batch as it arrives, then learn from it. A batch that is refused or fails changes nothing."""
        with torch.inference_mode(False), torch.enable_grad():
            held = self.state.hold()
            try:
                return self._step(_owned(images), held)
            except BaseException:
                self.state.put_back(held)
                raise

    def predict(self, images: Tensor) -> Prediction:
        """The same answer without learning, and without moving anything: not even the generator."""
        before = self.predictor.generator.get_state()
        try:
            return self._answer(images)
        finally:
            self.predictor.generator.set_state(before)

    def stream(self, batches: Iterable[Any]) -> Iterator[Prediction]:
        """Adapt over batches of images, or of (images, ...) as a DataLoader gives them."""
        for batch in batches:
            yield self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def export(self) -> nn.Module:
        """The adapted model on its own, in eval mode. It takes what the original model took: normalised images."""
        return copy.deepcopy(self.classifier.model).eval().requires_grad_(True)

    def to(self, device: torch.device | str) -> Self:
        self.classifier.to(device)
        self.state.to(torch.device(device))
        return self

    def freeze(self) -> Self:
        """From now on predict only. Views are still drawn afresh."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        self.frozen = False
        return self

    def reset(self) -> None:
        """Back to the very start, generator included: the same stream gives the same answers again."""
        self.state.load(self._initial)

    def restore(self) -> None:
        """Weights, optimiser and memories back to the start; the generator runs on."""
        self.state.load(self._initial, generator=False)

    @property
    def state_bytes(self) -> int:
        """How much memory the adapted state takes."""
        return self.state.nbytes

    def state_dict(self) -> Snapshot:
        return self.state.snapshot()

    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        self.state.load(snapshot)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted state as safetensors. The source model is not in it."""
        states.write(path, self.state.snapshot(), method=self.name, source=self._source)

    def load(self, path: str | os.PathLike[str]) -> Self:
        """Continue from a saved state, bit for bit, with the same source model and options."""
        self.state.load(states.read(path, method=self.name, source=self._source))
        return self

    # --- the frame ----------------------------------------------------------------------------------------------

    def _step(self, images: Tensor, held: Snapshot) -> Prediction:
        if self.frozen:
            return self._answer(images)
        draw = self.predictor.draw(images)
        prediction, loss = self.forward(images, draw)
        if loss is not None and not bool(torch.isfinite(loss)):
            log.warning("%s: the loss is %s; this batch is answered but not learnt from", self.name, loss.item())
            self.state.put_back(held, generator=False)
            return prediction.detach()
        if loss is not None:
            self.optimise(self._closure(images, draw, loss))
            assert self.optimizer is not None
            self.optimizer.zero_grad()
        with torch.no_grad():
            self.commit(prediction.detach())
        return prediction.detach()

    def _answer(self, images: Tensor) -> Prediction:
        with torch.no_grad(), self.classifier.untracked():
            return self.forward(images, self.predictor.draw(images))[0].detach()

    def _closure(self, images: Tensor, draw: Draw, loss: Tensor) -> Closure:
        """Gradients of the loss: at first of the one already computed, after that of a fresh pass on the same views."""
        computed = [loss]

        def closure() -> Tensor:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            with self.classifier.untracked():
                value = computed.pop() if computed else self.forward(images, draw)[1]
            assert value is not None
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return closure

    def _learning(self) -> list[nn.Parameter]:
        parameters = self.classifier.learning(self.updates)
        if self.updates == "norm" and not parameters:
            raise ValueError(
                f"{self.name} updates the scale and shift of normalisation layers and the model has none; "
                "expected BatchNorm, LayerNorm, GroupNorm, InstanceNorm or RMSNorm with affine parameters. "
                "Use a method that updates other parameters, such as 'pl'"
            )
        return parameters

    @functools.cached_property
    def _source(self) -> str:
        return self.state.fingerprint(self._initial)


def _owned(images: Any) -> Any:
    """A tensor made under inference mode cannot take part in a backward pass; its copy can."""
    return images.clone() if isinstance(images, Tensor) and images.is_inference() else images
