"""SAFER: several stochastic views of every image, weighted by how well their features agree, pooled into one answer.

images → views (V,B,3,H,W) → one forward pass → reliability → weights → mixing → Σ w_v p_v
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import mixing as mixings
from .. import pooling
from .._internal.checks import count
from .._internal.signatures import check_options
from ..errors import InvalidTypeError, InvalidValueError
from ..models import Classifier
from ..models import norm as norms
from ..views import OPERATORS, PRESETS, Draw, Pipeline, side_by_side
from .base import Memory, Outlook, Prediction, Predictor, Report, log_probabilities, probabilities
from .registry import register


@register("safer")
class Safer(Predictor):
    """The pooled predictor of the paper.

    Args:
        classifier: The classifier that is asked; a model is wrapped in one.
        views: Augmented views beside the original (the paper's N). 0 is the plain prediction.
        pool: How views are weighted: mean, entropy, top1, cc or cc_drop (the paper's).
        mixing: How the original is weighed against the other views: "none", "sigmoid" (SAFER-A), "gate" (SAFER-G), a
            dict with a name and options, or a Mixing.
        pipeline: What views are made of: "released", "paper", "gentle", a dict of Pipeline's arguments, or a Pipeline.
            Without a preset the mixing's own is taken: "gentle" for the gate, "released" otherwise.
        seed: Decides every draw. By default it is drawn from torch's own generator.
        chunk: At most so many images pass through the network at once, for small GPUs. A step then takes the memory of
            a chunk, and longer, since every chunk is computed twice. Batch statistics are those of each chunk.
    """

    channels = frozenset([1, 3])  # of the operators that make views

    def __init__(
        self,
        classifier: Classifier | nn.Module,
        views: int = 4,
        pool: str = "cc_drop",
        mixing: str | Mapping[str, Any] | mixings.Mixing = "none",
        pipeline: str | Mapping[str, Any] | Pipeline | None = None,
        seed: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(classifier, seed=seed)
        if chunk is not None:
            count(chunk=chunk)
        if isinstance(views, bool) or not hasattr(views, "__index__") or views < 0:
            raise InvalidValueError(f"views is {views!r}; expected the number of augmented views, 0 or more")
        self.rule = pooling.RULES.find(pool)
        self.views, self.pool = int(views), pool
        self.chunk = None if chunk is None else int(chunk)
        self.mixing = mixings.create(mixing)
        if 0 < views < self.mixing.least_views:
            raise InvalidValueError(
                f"views is {views}, too few for this mixing; expected at least {self.mixing.least_views}, or 0 for the "
                "plain prediction"
            )
        self.pipeline = _pipeline(pipeline, self.mixing.preset)
        size = self.mixing.memory_size(self.classifier.head.in_features)
        self.memory = Memory(size).to(self.classifier.device) if size else None
        self.estimates_suspicion = self.mixing.estimates_suspicion and self.views > 0
        self.norm = self.mixing.norm
        self.repeats = chunk is None  # a second pass over a chunk is not part of any program
        self._warned = False

    @property
    def joins(self) -> bool:
        return super().joins and self.chunk is None

    @property
    def settings(self) -> dict[str, Any]:
        mixing, pipeline = mixings.settings(self.mixing), self.pipeline.settings
        return {"views": self.views, "pool": self.pool, "mixing": mixing, "pipeline": pipeline, "chunk": self.chunk}

    @property
    def versions(self) -> dict[str, int]:
        preset, mixing = self.pipeline.preset, mixings.settings(self.mixing)["name"]
        operators = {f"operator {name}": operator.version for name, operator in OPERATORS.items()}
        parts = {f"pool {self.pool}": self.rule.version, f"preset {preset}": PRESETS[preset].version}
        return {**operators, **parts, f"mixing {mixing}": self.mixing.version}

    def draw_views(self, batch: int) -> Draw:
        return self.pipeline.draw(self.views, batch, self.generator)

    def make_views(self, images: Tensor, draw: Draw) -> Tensor:
        return draw.views(images, compile=self.classifier.compiled and images.is_cuda)

    def make_all_views(self, images: Tensor, draws: Sequence[Draw]) -> Tensor:
        return side_by_side(images, draws)

    def conclude(
        self, features: Tensor, logits: Tensor, memory: Tensor | None, pipelines: tuple[tuple[str, ...], ...] = ()
    ) -> Outlook:
        probs = probabilities(logits)
        views, images = probs.shape[:2]
        if views > 1 and images == 1 and self.rule.compares_views:
            self._warn_once()
        pooled = pooling.pool(self.pool, probs, features)
        verdict = self.mixing.weigh(
            pooled.weights, probs, features, features.new_zeros(0) if memory is None else memory
        )
        report = Report(
            weights=verdict.answer,
            reliability=pooled.reliability,
            dropped=pooled.dropped,
            suspicion=verdict.suspicion,
            signals=verdict.signals,
            view_probs=probs,
            pipelines=pipelines,
        )
        answer = weighted(verdict.answer, probs)
        # A mixing is about answers, not about features: those are pooled with the rule's own weights.
        scores = logits[0] if views == 1 else log_probabilities(answer)
        seen = Prediction(answer, scores, weighted(pooled.weights, features), report)
        lesson = seen
        if verdict.lesson is not verdict.answer:
            taught = weighted(verdict.lesson, probs)
            lesson = dataclasses.replace(seen, probs=taught, logits=log_probabilities(taught))
        aligned = lesson
        if verdict.aligned is not None:
            # The head is linear: its scores of pooled features are the pooled scores of the views' features.
            read = weighted(verdict.aligned, logits)
            aligned = Prediction(probabilities(read), read, weighted(verdict.aligned, features), report)
        return Outlook(seen, lesson, aligned, verdict.memory)

    def pass_views(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits (V·B,·) of views (V,B,3,H,W), some images at a time if they are too many."""
        if self.chunk is None or views.shape[0] * views.shape[1] <= self.chunk:
            return super().pass_views(views)
        parts = torch.split(views, max(1, self.chunk // len(views)), dim=1)
        passed = [[torch.unflatten(t, 0, part.shape[:2]) for t in self._pass_chunk(part)] for part in parts]
        features, logits = (torch.cat(results, dim=1).flatten(0, 1) for results in zip(*passed, strict=True))
        return features, logits

    def _pass_chunk(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Pass a chunk without keeping its activations: gradients compute them again, moving no running statistic."""
        passed: tuple[Tensor, Tensor] = checkpoint(
            self.classifier,
            views.flatten(0, 1),
            len(views),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), norms.again(self.classifier.norms())),
        )
        return passed

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a batch of one image: the agreement of views over a batch is undefined, so "
                f"{self.pool} gives every view the same weight. Larger batches let it compare them",
                stacklevel=2,
            )


register("safer-a")(functools.partial(Safer, mixing="sigmoid"))
register("safer-g")(functools.partial(Safer, mixing="gate"))


def weighted(weights: Tensor, views: Tensor) -> Tensor:
    """Return Σ_v w_v x_v of views (V,B,·)."""
    return (weights.unsqueeze(-1).to(views.dtype) * views).sum(dim=0)


def _pipeline(given: str | Mapping[str, Any] | Pipeline | None, preset: str) -> Pipeline:
    """The pipeline asked for; with the mixing's preset where none is named."""
    if isinstance(given, Pipeline):
        return given
    if given is not None and not isinstance(given, (str, Mapping)):
        raise InvalidTypeError(
            f"pipeline is {type(given).__name__}; expected one of {', '.join(PRESETS)}, a Pipeline, its arguments or "
            "None"
        )
    options = {"preset": given} if isinstance(given, str) else {"preset": preset, **(given or {})}
    check_options(Pipeline, options, "pipeline")
    return Pipeline(**options)
