"""Any image classifier as features and a linear head, without a change to its code."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from .._internal import checks
from .._internal.temporary import temporarily
from ..errors import InvalidTypeError, InvalidValueError, SaferError, UnknownNameError
from . import norm as norms_of
from .trunk import Trunk

if TYPE_CHECKING:
    from .card import Card

Statistics = float | Sequence[float]
Updates = Literal["none", "norm", "features", "all"]
PRECISIONS = ("float32", "bfloat16")


class Classifier(nn.Module):
    """Features and class scores of a model in one pass, for images in [0,1].

    Args:
        model: Any module that maps normalised images to class scores.
        head: The name of the linear layer that turns features into scores. By default it is what the model's
            `get_classifier()` returns, or else the last `nn.Linear`. The first forward pass checks it.
        mean: The mean of every channel in training; images are normalised here. By default it comes from the model's
            `pretrained_cfg` (timm); without one, images are not normalised. `mean=0, std=1` switches it off.
        std: The standard deviation of every channel, given together with `mean`.
        precision: "float32", or "bfloat16" for passes through the model; parameters, features and scores stay float32.
        compile: Whether torch.compile compiles the model, once for every shape of batch.

    Raises:
        InvalidTypeError: If `model` is not a module.
        InvalidValueError: If the head or the normalisation cannot be that of the model.

    Attributes:
        head: The linear layer.
        revision: How often layers or their layout have been replaced.
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
            raise InvalidTypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
        self.model = model
        self.head_name = _find_head(model, head)
        shift, scale = _normalisation(model, mean, std) or (None, None)
        self.register_buffer("mean", shift, persistent=False)
        self.register_buffer("std", scale, persistent=False)
        self._verified = False
        self._split = False  # whether the model runs without its head, so that it can be compiled whole
        self._trunk: Trunk | None = None
        self.revision = 0
        self.card: Card | None = None  # what its file says of it, if it was loaded from one
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
        """Return features (B,d) and logits (B,K) of images (B,3,H,W) in [0,1].

        Raises:
            InvalidValueError: If one image leaves a layer without batch statistics, or the head is not the last layer.
        """
        try:
            return self._run_split(images) if self._split else self._run_watched(images)
        except ValueError as error:
            # Torch refuses to normalise one value per channel by itself, which happens to a single small image.
            if isinstance(error, SaferError) or len(images) > 1 or not norms_of.use_batch(self.norms()):
                raise
            raise InvalidValueError(
                f"one image of {tuple(images.shape[2:])} pixels has no batch statistics ({error}). Send at least two "
                "images, or use SAFER or the method 'none'"
            ) from error

    def _run_split(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model without its head, then the head."""
        if self._trunk is None:
            self._trunk = Trunk(self.model, self.head_name, self.prepare, compile=self.compiled)
        with self._autocast(images):
            features = _logits(self._trunk(images))
            logits = self.head(features)
        return self._to_single(features), self._to_single(logits)

    def _run_watched(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model as it is and note what enters and leaves its head."""
        passed: list[tuple[Tensor, Tensor]] = []
        caller = threading.get_ident()

        def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if threading.get_ident() == caller:  # ignore another thread's pass through the same head
                passed.append((inputs[0], output))

        hook = self.head.register_forward_hook(watch)
        try:
            with self._autocast(images):
                output = self.model(self.prepare(images))
        finally:
            hook.remove()
        if not self._verified:
            self._verify(passed, _logits(output), len(images))
            self._split = self.compiled and self._can_be_split(images, passed[0][0])
        features, logits = passed[0]
        return self._to_single(features), self._to_single(logits)

    @torch.no_grad()
    def _can_be_split(self, images: Tensor, features: Tensor) -> bool:
        """Whether the model without its head gives exactly the features that entered the head."""
        try:
            with temporarily([self], compiled=False, _trunk=None), self.untracked():
                found = self._run_split(images)[0]
        except Exception:  # a model that does more with its head than call it; it is not compiled
            return False
        return found.shape == features.shape and bool(torch.equal(found, self._to_single(features)))

    def accelerate(self, *, precision: str | None = None, compile: bool | None = None) -> None:
        """Change the precision of forward passes, or whether they are compiled; `None` keeps a setting."""
        self.precision = check_precision(precision or self.precision)
        self.compiled = self.compiled if compile is None else compile
        self._trunk, self._verified, self._split = None, False, False
        self.revision += 1
        if self.precision != "float32":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _autocast(self, images: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "float32":
            return contextlib.nullcontext()
        # No cache: a pass uses every weight once, and a cast from before would be wrong when a graph is replayed.
        return torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False)

    def tuned(self) -> contextlib.AbstractContextManager[None]:
        """Inside, cuDNN looks for the fastest convolutions of a compiled model."""
        cudnn = torch.backends.cudnn
        return temporarily([cudnn], benchmark=cudnn.benchmark or (self.compiled and self.device.type == "cuda"))

    def prepare(self, images: Tensor) -> Tensor:
        """Return images as the model expects them: normalised, and in the memory layout of its weights."""
        images = self.normalise(images)
        return images if self.precision == "float32" else images.contiguous(memory_format=torch.channels_last)

    def _to_single(self, tensor: Tensor) -> Tensor:
        return tensor if self.precision == "float32" else tensor.float()

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        architecture: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        classes: Sequence[str] | None = None,
        side: int | None = None,
        resize: str | None = None,
    ) -> None:
        """Write the classifier to one file from which `safer_tta.load_classifier` builds it again.

        What timm, transformers or a file of this library built is recognised; of other models say how they are built.

        Args:
            path: The file, in the safetensors format. It holds weights and text, and no code.
            architecture: `timm:NAME`, `torchvision:NAME`, a name of the zoo, or `FILE.py:FUNCTION` of your own.
            arguments: What that function was called with, as a dict of numbers, words and lists.
            classes: The names of the classes in the order of the scores; by default numbers.
            side: Height and width of the model's images, in pixels.
            resize: How images come to that side: "stretch", or "crop 0.875 bicubic".

        Raises:
            InvalidValueError: If something is missing, or the file would give other answers than this classifier.
        """
        from . import packing

        packing.save(
            self, path, architecture=architecture, arguments=arguments, classes=classes, side=side, resize=resize
        )

    def features(self, images: Tensor) -> Tensor:
        """Return what enters the head, (B,d)."""
        return self(images)[0]  # type: ignore[no-any-return]

    def normalise(self, images: Tensor) -> Tensor:
        """Return images after the normalisation that the model was trained with."""
        return images if self.mean is None or self.std is None else (images - self.mean) / self.std

    def norms(self) -> list[nn.Module]:
        """Return every normalisation layer, in the order of registration."""
        return [module for module in self.model.modules() if norms_of.is_norm(module)]

    def replace_norms(self, replace: Callable[[nn.Module], nn.Module]) -> None:
        """Replace every normalisation layer by `replace(layer)`."""
        replaced: dict[nn.Module, nn.Module] = {}  # a layer that is used twice is replaced once, in both places
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            if norms_of.is_norm(module):
                if module not in replaced:
                    replaced[module] = replace(module)
                self.model.set_submodule(name, replaced[module])
        self._trunk = None  # it holds the layers from before
        self.revision += 1

    def trainable_parameters(self, updates: Updates) -> list[nn.Parameter]:
        """Return the parameters that learn: of "norm" layers, "features" (all but the head), "all" or "none"."""
        if updates == "none":
            return []
        if updates == "norm":
            return [p for norm in self.norms() for p in norm.parameters(recurse=False)]
        head = set(self.head.parameters()) if updates == "features" else set()
        return [p for p in self.model.parameters() if p not in head]

    def untracked(self) -> contextlib.AbstractContextManager[None]:
        """Inside, no forward pass moves a running statistic."""
        return norms_of.untracked(self.norms())

    def _verify(self, passed: list[tuple[Tensor, Tensor]], output: Any, batch: int) -> None:
        """Refuse a head that is not the model's last step, called once on one feature vector per image."""
        if not isinstance(output, Tensor):
            raise InvalidTypeError(
                f"the model returned a {type(output).__name__}; expected a tensor of class scores (B,K), or an object "
                "with such a tensor as .logits"
            )
        problem = ""
        if len(passed) != 1:
            problem = f"head {self.head_name!r} ran {len(passed)} times in one pass; expected once"
        elif passed[0][0].ndim != 2 or len(passed[0][0]) != batch:
            came = tuple(passed[0][0].shape)
            problem = f"head {self.head_name!r} received {came} for {batch} images; expected ({batch}, features)"
        elif output is not passed[0][1] and not torch.equal(output, passed[0][1]):
            problem = (
                f"the model's output is not what its head {self.head_name!r} returned; expected the scores of the "
                "head, without a softmax or another layer after it"
            )
        if problem:
            found = _linears(self.model)
            others = f"the last of {len(found)} linear layers are {', '.join(found[-5:])}"
            raise InvalidValueError(f"{problem}. Name another layer with Classifier(model, head=...): {others}")
        self._verified = True


def check_precision(precision: str) -> str:
    """Return the precision, or raise an error that lists the known ones."""
    checks.one_of(PRECISIONS, precision=precision)
    return precision


def _find_head(model: nn.Module, name: str | None) -> str:
    linears = _linears(model)
    if name is not None:
        if name not in linears:
            raise UnknownNameError.of("head", name, linears)
        return name
    offered = getattr(model, "get_classifier", None)
    head = offered() if callable(offered) else None
    found = [n for n in linears if model.get_submodule(n) is head] or linears[-1:]
    if not found:
        raise InvalidValueError(
            "no head found: the model has no nn.Linear layer. Expected features followed by a linear layer; make the "
            "last layer of the model an nn.Linear"
        )
    return found[0]


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]


def _logits(output: Any) -> Any:
    """Return the scores in a model's output; Hugging Face models return an object or a mapping that holds them."""
    if isinstance(output, Mapping):
        return output.get("logits")
    return getattr(output, "logits", output)


def _normalisation(model: nn.Module, mean: Statistics | None, std: Statistics | None) -> tuple[Tensor, Tensor] | None:
    if (mean is None) != (std is None):
        raise InvalidValueError("only one of mean and std was given; give both or neither")
    if mean is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        mean, std = config.get("mean"), config.get("std")
    if mean is None or std is None:
        return None
    shifted, scale = (torch.as_tensor(s, dtype=torch.float32).reshape(-1, 1, 1) for s in (mean, std))
    if {len(shifted), len(scale)} - {1, 3}:
        raise InvalidValueError(f"mean is {mean} and std is {std}; expected one number, or one for each of 3 channels")
    shifted, scale = shifted.expand(3, 1, 1), scale.expand(3, 1, 1)
    if not bool((scale > 0).all()):
        raise InvalidValueError(f"std is {std}; expected positive numbers")
    if bool((scale > 2).any()) or bool((shifted.abs() > 2).any()):
        raise InvalidValueError(
            f"mean is {mean} and std is {std}, as for pixels of 0..255; expected them for pixels in [0,1]. "
            "Divide both by 255"
        )
    reference = next(model.parameters(), torch.empty(0))
    return shifted.to(reference, copy=True), scale.to(reference, copy=True)
