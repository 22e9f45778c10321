"""Any image classifier as f = g∘h: a featurizer h and a linear head g, without touching its code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from . import norm as norms_of
from .trunk import Trunk

Statistics = float | Sequence[float]
Updates = Literal["none", "norm", "features", "all"]
PRECISIONS = ("float32", "bfloat16")


class Classifier(nn.Module):
    """Features and logits of a model in one pass, for images in [0,1].

    head: name of the linear layer that turns features into class scores. If not given: what the model's own
        `get_classifier()` says, else the last `nn.Linear` that was registered. Checked on the first forward pass.
    mean, std: the normalisation the model was trained with, per channel; applied here. If not given, taken from a
        `pretrained_cfg` that the model carries (timm), else images go in as they are. Never guessed from a batch.
        mean=0, std=1 says that there is none.
    precision: "float32", or "bfloat16" for passes through the model in half the bits, its weights laid out channels
        last; parameters, features, scores and everything computed from them stay in single precision.
    compile: let torch.compile make one program of the model, anew for every shape of batch, whose first is slow.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | None = None,
        mean: Statistics | None = None,
        std: Statistics | None = None,
        precision: str = "float32",
        compile: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module that returns class scores")
        self.model = model
        self.head_name = _find_head(model, head)
        shift, scale = _normalisation(model, mean, std)
        self.register_buffer("mean", shift, persistent=False)
        self.register_buffer("std", scale, persistent=False)
        self.tracking = True  # whether a pass moves statistics
        self._verified = False
        self._split = False  # whether the model is run without its head, as a compiler wants it
        self._trunk: Trunk | None = None
        self.revision = 0  # counts how often layers or their layout were replaced
        self.precision, self.compiled = "float32", False
        self.accelerate(precision=precision, compile=compile)

    mean: Tensor | None
    std: Tensor | None

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_submodule(self.head_name))  # as _find_head made sure

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(features (B,d), logits (B,K)) of images (B,3,H,W) in [0,1]."""
        try:
            if self._split:
                return self._in_two_steps(images)
            return self._watched(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"batch statistics of {len(images)} image(s) of {tuple(images.shape[2:])} pixels are undefined: a "
                "layer is left with one value per channel. Send at least two images, use SAFER or method 'none'"
            ) from error

    def _in_two_steps(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The model without its head, then the head."""
        if self._trunk is None:
            self._trunk = Trunk(self.model, self.head_name, self.prepared, compile=self.compiled)
        with self._passing(images):
            features = _logits(self._trunk(images))
            logits = self.head(features)
        return self._single(features), self._single(logits)

    def _watched(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The model as it is, with a look at what enters and leaves its head."""
        entered: list[Tensor] = []
        left: list[Tensor] = []
        caller = threading.get_ident()

        def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if threading.get_ident() == caller:  # another thread's pass through the same head is its own affair
                entered.append(inputs[0])
                left.append(output)

        hook = self.head.register_forward_hook(watch)
        try:
            with self._passing(images):
                output = self.model(self.prepared(images))
        finally:
            hook.remove()
        if not self._verified:
            self._verify(entered, left, _logits(output), len(images))
            self._split = self.compiled and self._can_be_split(images, entered[0])
        return self._single(entered[0]), self._single(left[0])

    @torch.no_grad()
    def _can_be_split(self, images: Tensor, features: Tensor) -> bool:
        """Whether the model without its head gives the very features that entered it; else it is not compiled."""
        whole, self.compiled = self.compiled, False
        try:
            with self.untracked():
                found = self._in_two_steps(images)[0]
        except Exception:  # a model that wants more of its head than calling it; it is watched from now on
            return False
        finally:
            self.compiled, self._trunk = whole, None
        return found.shape == features.shape and bool(torch.equal(found, self._single(features)))

    def accelerate(self, *, precision: str | None = None, compile: bool | None = None) -> None:
        """From now on pass images through the model in this precision, compiled or not; None leaves it as it is."""
        self.precision = check_precision(precision or self.precision)
        self.compiled = self.compiled if compile is None else compile
        self._trunk, self._verified, self._split = None, False, False
        self.revision += 1
        if self.precision != "float32":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _passing(self, images: Tensor) -> contextlib.AbstractContextManager[Any]:
        half = self.precision == "bfloat16"
        # A pass uses every weight once, and a cast that outlived a captured graph would be wrong at its replay.
        off = contextlib.nullcontext()
        return torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False) if half else off

    @contextlib.contextmanager
    def tuned(self) -> Iterator[None]:
        """A context in which a compiled model's convolutions are tried out for their fastest kernels, on CUDA."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or (self.compiled and self.device.type == "cuda")
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def prepared(self, images: Tensor) -> Tensor:
        """Images as the model wants them: normalised, and laid out as its weights are."""
        images = self.normalise(images)
        return images if self.precision == "float32" else images.contiguous(memory_format=torch.channels_last)

    def _single(self, tensor: Tensor) -> Tensor:
        return tensor if self.precision == "float32" else tensor.float()

    def features(self, images: Tensor) -> Tensor:
        """What enters the head: (B,d)."""
        return self(images)[0]  # type: ignore[no-any-return]

    def normalise(self, images: Tensor) -> Tensor:
        return images if self.mean is None or self.std is None else (images - self.mean) / self.std

    def norms(self) -> list[nn.Module]:
        """Every normalisation layer, in the order of registration."""
        return [module for module in self.model.modules() if norms_of.is_norm(module)]

    def replace_norms(self, replace: Callable[[nn.Module], nn.Module]) -> None:
        """Put `replace(layer)` in the place of every normalisation layer."""
        replaced: dict[nn.Module, nn.Module] = {}  # a layer that is used twice is replaced once, in both places
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if norms_of.is_norm(module):
                if module not in replaced:
                    replaced[module] = replace(module)
                self.model.set_submodule(name, replaced[module])
        self._trunk = None  # it was built of the layers that were there before
        self.revision += 1

    def learning(self, updates: Updates) -> list[nn.Parameter]:
        """The parameters that learn: scale and shift of "norm"s, "features" (all but the head), "all" or "none"."""
        if updates == "none":
            return []
        if updates == "norm":
            return [p for norm in self.norms() for p in norm.parameters(recurse=False)]
        head = set(self.head.parameters()) if updates == "features" else set()
        return [p for p in self.model.parameters() if p not in head]

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """A context in which no forward pass moves a running statistic."""
        before, self.tracking = self.tracking, False
        try:
            with norms_of.untracked(self.norms()):
                yield
        finally:
            self.tracking = before

    def _verify(self, entered: list[Tensor], left: list[Tensor], output: Any, batch: int) -> None:
        """The head must be the model's last step, called once on one feature vector per image."""
        found = _linears(self.model)
        others = ", ".join(found[-5:]) + (f" and {len(found) - 5} before" if len(found) > 5 else "")
        advice = f"Name another layer with Classifier(model, head=...): it has {others}." if len(found) > 1 else ""
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model returned {type(output).__name__}; expected a tensor of class scores (B,K), or an object "
                "that holds them as .logits"
            )
        if len(entered) != 1:
            raise ValueError(f"head {self.head_name!r} ran {len(entered)} times in one pass; expected once. {advice}")
        if entered[0].ndim != 2 or len(entered[0]) != batch:
            raise ValueError(
                f"head {self.head_name!r} received {tuple(entered[0].shape)} for {batch} images; "
                f"expected ({batch}, features). {advice}"
            )
        if output is not left[0] and not torch.equal(output, left[0]):
            raise ValueError(
                f"the model's output is not what its head {self.head_name!r} returned; expected the head's scores "
                f"as they are, without a softmax or a further layer behind them. {advice}"
            )
        self._verified = True


def check_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; expected one of {', '.join(PRECISIONS)}")
    return precision


def _find_head(model: nn.Module, name: str | None) -> str:
    linears = _linears(model)
    if name is not None:
        if name not in linears:
            raise ValueError(f"head {name!r} is not a Linear layer of the model; it has {linears or 'none at all'}")
        return name
    offered = getattr(model, "get_classifier", None)
    if callable(offered):
        head = offered()
        found = [n for n in linears if model.get_submodule(n) is head]
        if found:
            return found[0]
    if not linears:
        raise ValueError(
            "no head found: the model has no nn.Linear layer. Expected features followed by a linear layer; "
            "put the last layer of the model into an nn.Linear"
        )
    return linears[-1]


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]


def _logits(output: Any) -> Any:
    """Hugging Face models return an object, or a mapping, that holds the logits."""
    if isinstance(output, Mapping):
        return output.get("logits")
    return getattr(output, "logits", output)


def _normalisation(
    model: nn.Module, mean: Statistics | None, std: Statistics | None
) -> tuple[Tensor | None, Tensor | None]:
    if (mean is None) != (std is None):
        raise ValueError("mean and std belong together: give both or neither")
    if mean is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        mean, std = config.get("mean"), config.get("std")
    if mean is None or std is None:
        return None, None
    shifted, scale = (torch.as_tensor(s, dtype=torch.float32).reshape(-1, 1, 1) for s in (mean, std))
    if {len(shifted), len(scale)} - {1, 3}:
        raise ValueError(f"mean is {mean} and std {std}; expected one number, or one for each of the 3 channels")
    shifted, scale = shifted.expand(3, 1, 1), scale.expand(3, 1, 1)
    if not bool((scale > 0).all()):
        raise ValueError(f"std is {std}; expected positive numbers, one per channel")
    if bool((scale > 2).any()) or bool((shifted.abs() > 2).any()):
        raise ValueError(
            f"mean is {mean} and std {std}, for pixels of 0..255; expected them for pixels in [0,1]: divide both by 255"
        )
    reference = next(model.parameters(), torch.empty(0))
    return shifted.to(reference, copy=True), scale.to(reference, copy=True)
