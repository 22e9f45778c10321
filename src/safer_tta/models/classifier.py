"""Any image classifier as features and a linear head, without a change to its code."""

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .._internal import checks
from .._internal.temporary import temporarily
from ..errors import InvalidValueError, SaferError
from . import copies, normalisation
from . import head as heads
from . import norm as norms_of
from .kinds import check_kind
from .normalisation import Statistics
from .outputs import Output, Passed, Watch, check_output, check_scores, scores_of
from .statistics import StreamStatistics
from .stream_norm import StreamNorm
from .trunk import Trunk

if TYPE_CHECKING:
    from .card import Card

log = logging.getLogger("safer_tta")

Updates = Literal["none", "norm", "features", "all"]
PRECISIONS = ("float32", "bfloat16")


class Classifier(nn.Module):
    """Features and class scores of a model in one pass, for images in [0,1].

    Args:
        model: Any module that maps normalised images to class scores.
        head: The name of the layer that turns features into scores, or that layer; "a+b" averages two. By default it
            is what the model's `get_classifier()` returns, or else the last `nn.Linear`. The first forward pass
            checks it.
        mean: The mean of every channel in training; images are normalised here. By default it is what the model
            carries: timm's `pretrained_cfg`, Hugging Face's `preprocessor_config.json` in the folder it was loaded
            from, open_clip's `image_mean`, or torchvision's weights as `model.weights`. Without any of these, images
            are not normalised. `mean=0, std=1` switches it off.
        std: The standard deviation of every channel, given together with `mean`.
        output: Where the scores are in what the model returns: a key or attribute, an index, or a function of the
            output. By default they are the output itself or its `logits`.
        precision: "float32", or "bfloat16" for passes through the model; parameters, features and scores stay float32.
        compile: Whether torch.compile compiles the model, once for every shape of batch.

    Raises:
        InvalidTypeError: If `model` is not a module that can be adapted.
        InvalidValueError: If the head or the normalisation cannot be that of the model.

    Attributes:
        head: The linear layer, or several layers of the model as one.
        channels: How many channels images may have; empty if the model does not show it.
        normalised_by: Where the normalisation comes from, in words; empty if nothing declares it.
        revision: How often layers or their layout have been replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | nn.Module | None = None,
        mean: Statistics | None = None,
        std: Statistics | None = None,
        output: Output | None = None,
        precision: str = "float32",
        compile: bool = False,
    ) -> None:
        super().__init__()
        check_kind(model)
        self.model = model
        self.output = output
        self.head_name, self._named = heads.find(model, head)
        heads.check(model, self.head_name)
        self.channels = normalisation.channels_of(model)
        chosen = normalisation.choose(model, mean, std, self.channels)
        self.normalised_by, self._carrier = chosen.said_by, chosen.layer
        shift, scale = chosen.statistics or (None, None)
        if shift is not None and len(shift) > 1:
            self.channels = frozenset([len(shift)])
        self.register_buffer("mean", shift, persistent=False)
        self.register_buffer("std", scale, persistent=False)
        self._caches = copies.caches_of(model)
        self._verified = False
        self._split = False  # whether the model runs without its head, so that it can be compiled whole
        self._trunk: Trunk | None = None
        self.statistics: StreamStatistics | None = None
        self.revision = 0
        self.card: Card | None = None  # what its file says of it, if it was loaded from one
        self.precision, self.compiled = "float32", False
        self.accelerate(precision=precision, compile=compile)

    mean: Tensor | None
    std: Tensor | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Classifier":
        memo.update(copies.computed(self.model))
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @property
    def head(self) -> nn.Linear:
        return heads.of(self.model, self.head_name)

    @property
    def named_head(self) -> str | None:
        """The name of the head if the user or the model named it, None if it was found as the last linear layer."""
        return self.head_name if self._named else None

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def device(self) -> torch.device:
        return heads.matrix(next(iter(self._layers().values()))).device

    @property
    def dtype(self) -> torch.dtype:
        return heads.matrix(next(iter(self._layers().values()))).dtype

    def _layers(self) -> dict[str, nn.Module]:
        """Return the layers of the head by name."""
        return {name: self.model.get_submodule(name) for name in self.head_name.split(heads.JOIN)}

    def _carriers(self) -> dict[str, nn.Module]:
        """Return the layer that the normalisation was taken from, until it is known what that layer receives."""
        wanted = bool(self._carrier) and not self._verified
        return {self._carrier: self.model.get_submodule(self._carrier)} if wanted else {}

    def forward(self, images: Tensor, views: int = 1) -> tuple[Tensor, Tensor]:
        """Return features (B,d) and logits (B,K) of images (B,3,H,W) in [0,1].

        Args:
            images: The images; several views of each stand one after the other, (V·B,3,H,W).
            views: How many views of each image there are.

        Raises:
            InvalidValueError: If one image leaves a layer without batch statistics, or the head is not the last layer.
        """
        if self.statistics is not None:
            self.statistics.window.views = views
        try:
            features, logits = self._run_split(images) if self._split else self._run_watched(images)
        except ValueError as error:
            # Torch refuses to normalise one value per channel by itself, which happens to a single small image.
            if isinstance(error, SaferError) or len(images) > 1 or not norms_of.use_batch(self.norms()):
                raise
            raise InvalidValueError(
                f"one image of {tuple(images.shape[2:])} pixels has no batch statistics ({error}). Send at least two "
                "images, or use SAFER or the method 'none'"
            ) from error
        finally:
            if self.statistics is not None:
                self.statistics.window.views = 1  # as a user who calls the model directly expects
            for module, name in self._caches:  # what was computed of weights, which may learn now
                getattr(module, name).clear()
        if self.statistics is not None:
            self.statistics.collect(logits, views)
        return features, logits

    def _run_split(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model without its head, then the head."""
        if self._trunk is None:
            self._trunk = Trunk(self.model, self.head_name, self.prepare, compile=self.compiled)
        with self._autocast(images):
            features = scores_of(self._trunk(images), self.output)
            logits = self.head(features)
        return self._to_single(features), self._to_single(logits)

    def _run_watched(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model as it is and note what enters its head."""
        prepared = self.prepare(images)
        with Watch(self._layers()) as watch, Watch(self._carriers()) as inner, self._autocast(images):
            output = self.model(prepared)
        scores = scores_of(output, self.output)
        if not self._verified:
            normalisation.check_unchanged(prepared, inner.inputs(), self.normalised_by)
            self._verify(images, output, scores, watch)
        return self._to_single(watch.features()), self._to_single(scores)

    def _verify(self, images: Tensor, output: Any, scores: Any, watch: Watch) -> None:
        """Refuse a head that is not the model's last step, and learn whether the model runs without it too."""

        def explain() -> Passed:
            return self._watch_all(images)

        check_output(output, scores, len(images), explain)
        of_head = check_scores(scores, watch, name=self.head_name, named=self._named, explain=explain)
        if not of_head:
            log.warning("more follows the head %r: its input are the features, the output the scores", self.head_name)
        self._verified = True
        self._split = self.compiled and of_head and self._can_be_split(images, watch.features(), scores)

    @torch.no_grad()
    def _watch_all(self, images: Tensor) -> Passed:
        """Run the model again, and note what enters and leaves every layer that could be a head."""
        with Watch(heads.candidates(self.model)) as watch, self._autocast(images), self.untracked():
            self.model(self.prepare(images))
        return watch.passed

    @torch.no_grad()
    def _can_be_split(self, images: Tensor, features: Tensor, scores: Tensor) -> bool:
        """Whether the model without its head gives exactly the features that entered it, and the head the scores."""
        if heads.JOIN in self.head_name:
            return False
        try:
            with temporarily([self], compiled=False, _trunk=None), self.untracked():
                found = self._run_split(images)
        except Exception:  # a model that does more with its head than call it; it is not compiled
            return False
        pairs = zip(found, (self._to_single(features), self._to_single(scores)), strict=True)
        return all(a.shape == b.shape and bool(torch.equal(a, b)) for a, b in pairs)

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

    def use_norm(self, norm: norms_of.Norm) -> bool:
        """Replace the normalisation layers by those of an entry of `NORMS`; return whether any was replaced."""
        self.stop_following()
        before = self.norms()
        if norm.follows:
            self.statistics = StreamStatistics(self.num_classes).to(self.device)
            window = self.statistics.window
            self.replace_norms(lambda layer: norm.function(layer, window))
            self.statistics.layers = tuple(layer for layer in self.norms() if isinstance(layer, StreamNorm))
            if not self.statistics.layers:
                self.statistics = None
        else:
            self.replace_norms(norm.function)
        return self.norms() != before

    def stop_following(self) -> None:
        """Put ordinary batch norms, with the statistics of now, in the place of those that follow a stream."""
        if self.statistics is not None:
            self.replace_norms(lambda layer: layer.folded() if isinstance(layer, StreamNorm) else layer)
            self.statistics = None

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """Inside, passes through the model are a look at one batch."""
        return contextlib.nullcontext() if self.statistics is None else self.statistics.looking()

    def trainable_parameters(self, updates: Updates) -> list[nn.Parameter]:
        """Return the parameters that learn: of "norm" layers, "features" (all but the head), "all" or "none"."""
        if updates == "none":
            return []
        if updates == "norm":
            return [p for norm in self.norms() for p in norm.parameters(recurse=False)]
        head = set(self.head.parameters()) if updates == "features" else set()
        return [p for p in self.model.parameters() if p not in head]

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """Inside, no forward pass moves a running statistic."""
        following = [] if self.statistics is None else [self.statistics]
        with norms_of.untracked(self.norms()), temporarily(following, tracking=False):
            yield


def check_precision(precision: str) -> str:
    """Return the precision, or raise an error that lists the known ones."""
    checks.one_of(PRECISIONS, precision=precision)
    return precision
