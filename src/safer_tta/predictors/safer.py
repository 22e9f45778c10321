"""SAFER: several stochastic views of every image, weighted by how well their features agree, pooled into one answer.

images → views (V,B,3,H,W) → one forward pass → reliability → weights → [mixing] → Σ w_v p_v
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import mixing as mixings
from .. import pooling
from ..models import Classifier
from ..models import norm as norms
from ..options import check
from ..views import PRESETS, Draw, Pipeline
from .base import Prediction, Predictor, Report, log_probabilities, probabilities


class Safer(Predictor):
    """The pooled predictor of the paper.

    views: augmented views beside the original (N; V = N + 1). 0 is the plain prediction.
    pool: how views are weighted: mean, entropy, top1, cc or cc_drop (the paper's).
    mixing: None (SAFER); "sigmoid", a dict of Mixing's arguments or a Mixing (SAFER-A): weight the original view by
        how suspicious it looks; "gate", a Gate or {"name": "gate", ...}: by how likely it is to be attacked.
    chunk: at most so many images at once through the network, for small GPUs: the memory of a step is that of a chunk,
        its time is longer, as every chunk is computed twice. Batch statistics are then those of each chunk, not of
        all views together.
    pipeline: "released", "paper", "gentle", a dict of Pipeline's arguments or a Pipeline: which operators a view is
        made of. None, or a dict without preset: what the mixing asks for (the gate: "gentle"), else "released".
    """

    def __init__(
        self,
        classifier: Classifier | nn.Module,
        views: int = 4,
        pool: str = "cc_drop",
        mixing: str | Mapping[str, Any] | mixings.Mixer | None = None,
        pipeline: str | Mapping[str, Any] | Pipeline | None = None,
        seed: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(classifier, seed=seed)
        if chunk is not None and (isinstance(chunk, bool) or not hasattr(chunk, "__index__") or chunk < 1):
            raise ValueError(f"chunk is {chunk!r}; expected a number of images, at least 1, or None for all at once")
        if isinstance(views, bool) or not hasattr(views, "__index__") or views < 0:
            raise ValueError(f"views is {views!r}; expected the number of augmented views, 0 or more (the paper: 4)")
        pooling.check_rule(pool)
        if pipeline is not None and not isinstance(pipeline, str | Mapping | Pipeline):
            raise TypeError(
                f"pipeline is {type(pipeline).__name__}; expected one of {', '.join(PRESETS)}, a Pipeline, its "
                "arguments or None"
            )
        self.views, self.pool = int(views), pool
        self.chunk = None if chunk is None else int(chunk)
        self.mixing = mixings.create(mixing)
        if self.mixing is not None and 0 < views < self.mixing.least_views:
            raise ValueError(
                f"views is {views}, too few for this mixing; expected at least {self.mixing.least_views}, or 0 for the "
                "plain prediction"
            )
        self.pipeline = _pipeline(pipeline, getattr(self.mixing, "pipeline", None) or "released")
        self._remember_afresh()
        self.repeats = chunk is None  # a second pass over a chunk is not part of any program
        self._warned = False

    @property
    def settings(self) -> dict[str, Any]:
        mixing = mixings.settings(self.mixing)
        pipeline = dataclasses.asdict(self.pipeline)
        return {"views": self.views, "pool": self.pool, "mixing": mixing, "pipeline": pipeline, "chunk": self.chunk}

    def _remember_afresh(self) -> None:
        """A memory of its own, empty, where the mixing has one."""
        mixing: Any = self.mixing
        numbers = mixing.memory if hasattr(mixing, "remembering") else 0
        self.memory: Memory | None = Memory(numbers).to(self.classifier.device) if numbers else None

    def remember(self, prediction: Prediction) -> None:
        if self.memory is not None and prediction.remembered is not None:
            seen, now = self.memory.seen, prediction.remembered.detach()
            seen.copy_(torch.where(torch.isfinite(now), now, seen))  # in place: a step may be replayed as a graph

    def draw_views(self, batch: int) -> Draw:
        return self.pipeline.draw(self.views, batch, self.generator)

    def predict(self, images: Tensor, draw: Draw) -> Prediction:
        views = draw.views(images, compile=self.classifier.compiled and images.is_cuda)
        features, logits = self._through(views.flatten(0, 1))
        features, logits = (t.view(*views.shape[:2], -1) for t in (features, logits))
        probs = probabilities(logits)
        if len(views) > 1 and len(images) == 1 and self.pool in pooling.BY_AGREEMENT:
            self._warn_once()
        pooled, now = pooling.pool(self.pool, probs, features), None
        if self.mixing is None:
            weights, suspicion = pooled.weights, mixings.signal("feat_disagreement", probs.detach(), features.detach())
        elif self.memory is None:
            weights, suspicion = self.mixing.mix(pooled.weights, probs, features)
        else:
            mixing: Any = self.mixing
            # By a copy: what gradients go through must stay as it was.
            weights, suspicion, now = mixing.remembering(pooled.weights, probs, features, self.memory.seen.clone())
        report = Report(
            weights=weights,
            reliability=pooled.reliability,
            dropped=pooled.dropped,
            signal=suspicion.detach(),
            view_probs=probs,
            pipelines=draw.names,
        )
        # A mixing is about the answer, not about what features say: those are pooled with the base weights.
        mean, pooled_features = _weighted(weights, probs), _weighted(pooled.weights, features)
        if len(views) == 1:
            return Prediction(mean, logits[0], pooled_features, report, remembered=now)
        lesson = None if getattr(self.mixing, "teaches", True) else _weighted(pooled.weights, probs)
        of_features = getattr(self.mixing, "of_features", lambda weights, base_weights: None)
        shares = of_features(weights, pooled.weights)
        # The head is linear: what it makes of pooled features is what it makes of every view's, pooled.
        aligned, read = (None if shares is None else _weighted(shares, said) for said in (features, logits))
        return Prediction(
            mean, log_probabilities(mean), pooled_features, report,
            lesson=lesson, aligned=aligned, read=read, remembered=now,
        )  # fmt: skip

    def _through(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All views through the classifier: at once, or chunk by chunk."""
        if self.chunk is None or len(images) <= self.chunk:
            features, logits = self.classifier(images)
            return features, logits
        parts = [self._through_again(part) for part in torch.split(images, self.chunk)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _through_again(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk whose intermediate results are forgotten, and computed again when gradients need them; that second
        pass moves no running statistic."""
        seen: tuple[Tensor, Tensor] = checkpoint(
            self.classifier,
            images,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), norms.again(self.classifier.norms())),
        )
        return seen

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of one image: agreement between views is undefined, so {self.pool} gives every view the same "
                "weight. Collect larger batches for reliability to mean something",
                stacklevel=2,
            )


class Memory(nn.Module):
    """What a mixing remembers from batch to batch."""

    seen: Tensor

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(numbers))


def _weighted(weights: Tensor, views: Tensor) -> Tensor:
    """Σ_v w_v x_v over (V,B,·)."""
    return (weights.unsqueeze(-1).to(views.dtype) * views).sum(dim=0)


def _pipeline(given: str | Mapping[str, Any] | Pipeline | None, preset: str) -> Pipeline:
    """What is asked for; of the mixing's preset where nothing is said of that."""
    if isinstance(given, Pipeline):
        return given
    if isinstance(given, str):
        return Pipeline(given)
    options = {"preset": preset, **(given or {})}
    check(Pipeline, options, "the pipeline")
    return Pipeline(**options)
