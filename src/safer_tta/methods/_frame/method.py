"""The frame of every test-time adaptation method: validate → draw → forward → check → optimise → remember → commit."""

import contextlib
import dataclasses
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ..._internal.hints import OF_MODULES, refuse_attribute
from ..._internal.locking import exclusive
from ..._internal.optimizers import finite_gradients
from ..._internal.progress import counted, length
from ..._internal.seeds import draw_seed
from ..._internal.signatures import check_names
from ...errors import NotFiniteError
from ...evaluation import Evaluation, evaluate
from ...models.classifier import Updates
from ...predictors import Draw, Outlook, Prediction, Predictor, take_images
from .closing import Closure, closing
from .cost import Cost
from .cuda_graphs import Accelerator
from .exporting import export
from .options import declared, signature
from .pace import paced
from .parameters import trainable_parameters
from .state import Snapshot, State
from .step import Step
from .summary import summarise

log = logging.getLogger("safer_tta")


class Method:
    """Adapts the classifier behind a predictor, one batch at a time. Threads may share it: its uses exclude each other.

    A method's file declares its options and fills in what is particular to it:

    - `prepare()` replaces norms and builds memories (`self.state.memory`) and teachers, before the optimiser exists.
    - `forward()` asks the predictor and returns a `Step`. It writes nothing and may be called twice with one draw.
      A method that asks once, and needs nothing else for its loss, fills in `objective()` instead.
    - `optimise()` takes one optimiser step by default; sharpness-aware methods call the closure twice.
    - `again()` is the loss of a second pass over the same views, if `optimise()` asks for one.
    - `commit()` runs after a healthy step only: averages, memories, restores. It may `learn()` a second time.

    Attributes:
        updates: Which parameters learn: "none", "norm" (scale and shift), "features" (all but the head) or "all".
        cost: Passes through the model that a step takes.
        by_predictor: Whether the answer is the predictor's own, without a teacher, prototypes or an average.
        own_norms: Whether it replaces batch norms by layers of its own.
        own_views: Whether it augments images itself, by `draw.generator()`.
        repeats: Whether every step is one program: always a loss, nothing read back, no `optimise()` or `commit()`.
        version: Raised when its answers change; a part of the names of runs.
        frozen: Whether it only predicts.
        watched: Whether a guard looks at every answer.
    """

    name: ClassVar[str]
    updates: ClassVar[Updates] = "none"
    cost: ClassVar[Cost] = Cost(1, 1)
    by_predictor: ClassVar[bool] = True
    own_norms: ClassVar[bool] = False
    own_views: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    version: ClassVar[int] = 1
    lr: float  # an option of every method that learns with the optimiser of `build_optimizer`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__init__ is Method.__init__:
            cls.__signature__ = signature(cls)  # type: ignore[attr-defined]

    def __init__(self, predictor: Predictor, **options: Any) -> None:
        known = declared(type(self))
        check_names(options, known, self.name)
        for name, option in known.items():
            setattr(self, name, options.get(name, option.default))
        self.predictor = predictor
        self.classifier = predictor.classifier
        self.frozen = False
        self.watched = False
        self._refused: Counter[str] = Counter()
        self._share_nothing()
        self.classifier.eval().requires_grad_(False)
        self.state = State(predictor)
        self.statistics = self.classifier.statistics
        if self.statistics is not None:
            self.statistics.start(learning=self.updates != "none")
        self.prepare()
        parameters = trainable_parameters(self.classifier, self.updates, self.name)
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.optimizer: Optimizer | None = None
        if parameters:
            self.optimizer = self.state.optimizers["optimizer"] = self.build_optimizer(parameters)
        if self.classifier.device.type == "cuda":
            self.state.to(self.classifier.device)  # for the fused optimisers of a GPU
        self.state.start()

    def _share_nothing(self) -> None:
        """Make what a copy of a method must not share with it."""
        self._lock = threading.RLock()
        self.accelerator = Accelerator(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "accelerator")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_nothing()

    def __getattr__(self, name: str) -> Any:
        refuse_attribute(self, name, OF_MODULES)

    def __repr__(self) -> str:
        return summarise(self)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that differ from their defaults: `create(name, predictor, **settings)` makes it again."""
        options = {name: (getattr(self, name), option.default) for name, option in declared(type(self)).items()}
        return {name: value for name, (value, default) in options.items() if value != default}

    # --- what a method's file may fill in -----------------------------------------------------------------------

    def prepare(self) -> None: ...

    def forward(self, images: Tensor, draw: Draw) -> Step:
        seen = self.predictor.look(images, draw)
        return Step(seen, self.objective(seen))

    def objective(self, seen: Outlook) -> Tensor | None:
        raise NotImplementedError

    def build_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        return Adam(parameters, lr=self.lr)

    def optimise(self, closure: Closure) -> None:
        closure()
        assert self.optimizer is not None
        self.optimizer.step()

    def answering(self) -> contextlib.AbstractContextManager[None]:
        """A context in which `predictor` is the network that answers, for attackers who know the method."""
        return contextlib.nullcontext()

    def draw(self, images: Tensor) -> Draw:
        """Draw everything random about a batch, with a seed for the method's own views if it has some."""
        draw = self.predictor.draw(images)
        return dataclasses.replace(draw, seed=draw_seed(self.predictor.generator)) if self.own_views else draw

    def again(self, images: Tensor, draw: Draw, step: Step) -> Tensor | None:
        return self.forward(images, draw).loss

    def commit(self, images: Tensor, step: Step) -> None: ...

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of a loss; drop all of them and raise NotFiniteError if one is not finite."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not all(map(finite_gradients, self.state.optimizers.values())):
            self.state.drop_gradients()
            raise NotFiniteError("a gradient is not finite; the step was not taken")

    def learn(self, loss: Callable[[], Tensor | None]) -> None:
        """Make one more update, from within `commit`; `loss` is called once for every gradient that it asks for."""
        held = self.state.hold()
        with torch.enable_grad():
            value = loss()
            if value is not None:
                self._update(value, loss, held)

    # --- what a user calls --------------------------------------------------------------------------------------

    def __call__(self, images: Tensor) -> Prediction:
        """Predict a batch as it arrives, then learn from it.

        A batch that is refused, or that fails before the optimiser's step, changes nothing.

        Args:
            images: (B,3,H,W), floats in [0,1] or uint8.
        """
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            if self.accelerator.active:
                return self.accelerator.adapt(images)
            self.accelerator.prefetch.undo()
            with self.undo_on_failure() as held:
                ready, draw = self.draw_batch(images)
                if self.frozen:
                    return self._answer(ready, draw)
                with self.classifier.tuned():
                    return self._step(ready, draw, held)

    @exclusive
    def predict(self, images: Tensor) -> Prediction:
        """Return the answer that adapting would give, without learning and without moving anything."""
        held = self.state.hold()
        try:
            return self._answer(*self.draw_batch(images))
        finally:
            self.state.put_back(held)

    def stream(
        self, batches: Iterable[Any], *, prefetch: bool = True, key: str | None = None, progress: bool = False
    ) -> Iterator[Prediction]:
        """Adapt over many batches.

        Args:
            batches: Batches of images, of (images, ...) as a DataLoader gives them, or dicts with images in them.
            prefetch: On CUDA, take the next batch before this one's answer is handed out, and make its views meanwhile.
                Pass False for live sources, where an answer must not wait for the next batch.
            key: The key of the images in batches that are dicts. By default it is Hugging Face's, "pixel_values".
            progress: Whether to show how many batches are answered, in a terminal or a notebook.
        """
        images = (take_images(batch, key) for batch in batches)
        answers = self.accelerator.stream(images) if prefetch and self.accelerator.active else map(self, images)
        return counted(answers, self.name, length(batches)) if progress else answers

    def evaluate(self, loader: Iterable[Any], *, key: str | None = None) -> Evaluation:
        """Adapt over batches of (images, labels), and return accuracy, calibration and suspicion as a table.

        With batches of (images, labels, attacked) the table also has clean and attacked images separately.
        """
        return evaluate(self, loader, key=key)

    def freeze(self) -> Self:
        """Only predict from now on. Views are still drawn afresh."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Learn again from now on."""
        self.frozen = False
        return self

    @exclusive
    def reset(self) -> None:
        """Return to the very start, generator included: the same stream gives the same answers again."""
        self.state.load(self.state.initial)

    @exclusive
    def restore(self) -> None:
        """Return weights, optimiser and memories to the start; the generator continues."""
        self.state.load(self.state.initial, generator=False)

    @exclusive
    def state_dict(self) -> Snapshot:
        """Return a copy of everything that changes while the method adapts, {name: tensor}."""
        return self.state.snapshot()

    @exclusive
    def load_state_dict(self, snapshot: Mapping[str, Tensor]) -> None:
        """Continue from a state; one that does not fit is refused and changes nothing."""
        self.state.load(snapshot)

    @exclusive
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapted state to a safetensors file. The source model is not in it."""
        self.state.save(path, self.name)

    @exclusive
    def load(self, path: str | os.PathLike[str]) -> Self:
        """Continue from a saved state, bit for bit, with the same source model and options."""
        self.load_state_dict(self.state.read(path, self.name))
        return self

    @exclusive
    def to(self, device: torch.device | str) -> Self:
        """Move the model and the state to a device."""
        self.classifier.to(device)
        self.state.to(torch.device(device))
        return self

    @exclusive
    def export(self) -> nn.Module:
        """Return a copy of the adapted model in eval mode. It takes what the original took: normalised images.

        Methods that answer with more than the model (cotta, rotta, t3a) leave the rest behind. Batch norms normalise
        with running statistics, those of the source if the method dropped them (Tent): a warning says so.
        """
        return export(self.classifier.model, self.name)

    @property
    def state_bytes(self) -> int:
        """How much memory the adapted state takes."""
        return self.state.nbytes

    @property
    def refused(self) -> Counter[str]:
        """How many losses and gradients were not learnt from since they were not finite. Waits for the device."""
        self.accelerator.settle()
        return self._refused

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Inside, no other thread uses the method, and the caller's inference mode is off: what is made must train."""
        with self._lock, torch.inference_mode(False):
            self.accelerator.prefetch.undo()
            yield

    # --- the frame ----------------------------------------------------------------------------------------------

    def draw_batch(self, images: Any) -> tuple[Tensor, Draw]:
        """Return images that are ready for the model, and their draw; images that are not a batch are refused."""
        if isinstance(images, Tensor):
            # Without the caller's graph: learning from a batch must not reach back into what made it. A tensor made
            # under inference mode cannot take part in a backward pass; its copy can.
            images = images.clone() if images.is_inference() else images.detach()
        draw = self.draw(images)
        return self.predictor.to_model(images), draw

    def look(self, images: Tensor, draw: Draw) -> Step:
        """Return what `forward` makes of a batch. Statistics come from the first look at it."""
        if self.statistics is not None:
            self.statistics.open()
        return self.forward(images, draw)

    def remember(self, step: Step) -> None:
        """Note what the predictor and the statistics of the stream remember of a batch that was learnt from."""
        self.predictor.remember(step.seen.memory)
        if self.statistics is not None:
            self.statistics.commit()

    @contextlib.contextmanager
    def undo_on_failure(self) -> Iterator[Snapshot]:
        """Inside, an error leaves what a forward pass moves as it was; gives what it would put back."""
        held = self.state.hold()
        try:
            yield held
        except BaseException:
            self.state.put_back(held)
            self.state.drop_gradients()
            raise

    def _step(self, images: Tensor, draw: Draw, held: Snapshot) -> Prediction:
        step = self.look(images, draw)
        answer = step.prediction.detach()
        if step.loss is None or not self._diverse():
            healthy = self._check(answer.probs.sum(), held)
        else:
            with paced(self.optimizer, self.statistics, len(images)):
                healthy = self._update(step.loss, lambda: self.again(images, draw, step), held)
        if healthy:
            with torch.no_grad():
                self.remember(step)  # before a commit that may restore everything, this too
                try:
                    self.commit(images, step.detach())
                except NotFiniteError:  # of a second update: it is left out, and what was learnt before it stays
                    self._refused["gradients"] += 1
        return answer

    def _diverse(self) -> bool:
        """Return whether the stream shows enough different images to learn from, where statistics follow it."""
        return self.statistics is None or bool(self.statistics.diverse())

    def _update(self, loss: Tensor, again: Callable[[], Tensor | None], held: Snapshot) -> bool:
        """Learn from a loss; return False, with everything as it was held, if something is not finite."""
        if not self._check(loss.detach(), held):
            return False
        try:
            self.optimise(closing(self, loss, again))
        except NotFiniteError:
            self._refused["gradients"] += 1
            self.state.put_back(held, generator=False)
            return False
        finally:
            self.state.drop_gradients()
        return True

    def _check(self, figure: Tensor, held: Snapshot) -> bool:
        """Return whether a figure is finite; if not, put back what was held."""
        finite = bool(torch.isfinite(figure))
        if not finite:
            self._refused["losses"] += 1
            log.warning("%s: the batch gives %s; it is answered but not learnt from", self.name, figure.item())
            self.state.put_back(held, generator=False)
        return finite

    def _answer(self, images: Tensor, draw: Draw) -> Prediction:
        with torch.no_grad(), self.classifier.untracked():
            return self.forward(images, draw).prediction.detach()
