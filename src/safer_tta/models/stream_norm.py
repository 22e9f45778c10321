"""A batch norm whose statistics follow a stream: robust, tied to the source, and alike for every batch size.

Every image votes: one vote an image, however many views and pixels it has. A vote is the mean and the mean square of
every channel, on the scale of the source; the middle half of a batch's votes counts. The statistics of the stream
fade over about 256 images, and the batch at hand is a sixteenth of them at most, so that no image can do much to
another. They are combined with the source's as two samples would be:

    λ = n / (n + n₀)        statistics = λ · stream + (1 - λ) · source

The source counts for n₀ = 64 images and the stream for n independent ones: at most 64, and far fewer while the answers
say that images of one class follow each other, 1/n = 1/images + (Σ p² - its value by chance).

Gradients flow as if the statistics were those of the batch. Batch norm undoes any scale and shift of its inputs, so a
step gains nothing from them. Without that, a method that learns from its own confidence lets activations grow.

Batches of several streams may pass side by side, an image of each in turn, (V,B,G,...). Scale, shift, votes and
deviations then have a first dimension of streams, G, and nothing is computed across streams.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidValueError
from .window import Window

MOST_OF_BATCH = 1 / 16  # of the stream's statistics
POLLED = 16  # votes that are compared, at least; those of the images before complete a smaller batch
LEFT_OUT = 0.25  # of the votes, on either side
LARGEST_VOTE = 6e4  # that half precision holds
FOLLOWED = ("votes", "deviations")  # the buffers that follow the stream
LEAST_VARIANCE = 0.05  # as a share of the source's


class StreamNorm(nn.Module):
    """A batch norm with statistics of source, stream and batch.

    Attributes:
        follows: Whether the batch at hand counts, and the memory moves; a method decides that. Without it, and whatever
            the mode, statistics are those of source and stream.
        exact: Whether gradients are those of what is computed, as an attacker wants them.
        noted: What the last pass noted for the memory.
    """

    running_mean: Tensor
    running_var: Tensor
    votes: Tensor
    deviations: Tensor

    def __init__(self, norm: _BatchNorm, window: Window, behind: Sequence[nn.Module]) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight, self.bias, self.eps, self.num_features = norm.weight, norm.bias, norm.eps, norm.num_features
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        # In half precision: they are most of what a method's state has of it.
        self.register_buffer("votes", norm.running_mean.new_zeros(POLLED, 2 * norm.num_features, dtype=torch.float16))
        self.register_buffer("deviations", norm.running_mean.new_zeros(2 * norm.num_features))
        self.behind = nn.Sequential(*behind)
        # In tuples, so that they are no submodules: the window is a part of the classifier, the norm is replaced.
        self._window, self._norm = (window,), (norm,)
        self.follows = self.exact = False
        self.noted: tuple[Tensor, Tensor] | None = None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if not self.follows:
            mean, variance = self.statistics(self._window[0].trust() * self.deviations)
            out = F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)
            return self.behind(out)  # type: ignore[no-any-return]
        window = self._window[0]
        if len(x) % (window.views * window.streams.numel()):
            raise InvalidValueError(
                f"a batch norm got {len(x)} inputs, which is no multiple of the {window.views} views of each image; "
                "expected a model that passes all views together, or norm='model'"
            )
        moments = _moments(x if self.exact else x.detach())
        by_view = (torch.unflatten(moment, 0, (window.views, -1)) for moment in moments)
        votes = self.vote(*map(window.side_by_side, by_view))
        counted = self.count(votes)
        self.noted = votes[..., -POLLED:, :].detach(), counted.detach()
        share = window.share(votes.shape[-2]).clamp(max=MOST_OF_BATCH).to(counted)
        deviations = torch.lerp(self.deviations, counted, share)
        mean, variance = self.statistics(window.trust() * deviations)
        if self.exact:
            out = _normalise(x, mean, variance, self.weight, self.bias, self.eps)
        else:
            own = (torch.unflatten(moment, 0, (-1, *window.streams)).mean(dim=0) for moment in moments)
            out = as_batch_norm(x, mean, variance, self.weight, self.bias, self.eps, *own)
        return self.behind(out)  # type: ignore[no-any-return]

    def vote(self, mean: Tensor, square: Tensor) -> Tensor:
        """Return one vote an image, (B,2C), from moments (V,B,C): of its augmented views, if there are any."""
        if len(mean) > 1:
            mean, square = mean[1:], square[1:]
        mean, square = mean.mean(dim=0), square.mean(dim=0)
        scale = self.running_var + self.eps
        first = (mean - self.running_mean) * scale.rsqrt()
        second = square + self.running_mean * (self.running_mean - 2 * mean)  # about the source's mean
        return torch.cat([first, (second + self.eps) / scale - 1], dim=-1)

    def count(self, votes: Tensor) -> Tensor:
        """Return the result of votes (B,2C), completed by those before them."""
        if votes.shape[-2] < POLLED:
            votes = torch.cat([self.votes.to(votes), votes], dim=-2)[..., -POLLED:, :]
        return middle_mean(votes)

    def statistics(self, deviations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance (C,) from deviations (2C,) on the scale of the source."""
        first, second = deviations.chunk(2, dim=-1)
        scale = self.running_var + self.eps
        mean = self.running_mean + first * scale.sqrt()
        return mean, scale * (1 + second - first.square()).clamp(min=LEAST_VARIANCE) - self.eps

    @torch.no_grad()
    def remember(self, passes: Sequence[tuple[Tensor, Tensor]], images: int) -> None:
        """Note the votes of a batch that was learnt from."""
        votes = torch.cat([self.votes, *(votes for votes, _ in passes)], dim=-2)[..., -POLLED:, :]
        counted = torch.stack([counted for _, counted in passes]).mean(dim=0)
        self.votes.copy_(torch.where(torch.isfinite(votes), votes, self.votes).clamp(-LARGEST_VOTE, LARGEST_VOTE))
        share = self._window[0].share(images).to(self.deviations)
        self.deviations.lerp_(torch.where(torch.isfinite(counted), counted, self.deviations), share)

    @torch.no_grad()
    def folded(self) -> nn.Module:
        """Return the batch norm that it replaced, with the statistics of source and stream."""
        norm = self._norm[0]
        mean, variance = self.statistics(self._window[0].trust() * self.deviations)
        norm.running_mean, norm.running_var = mean, variance.clamp(min=0)
        return norm


class _AsBatchNorm(torch.autograd.Function):
    """Normalise with given statistics, and let gradients flow as if they were those of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        own_mean: Tensor,
        own_square: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, variance, weight, own_mean, own_square)
        ctx.eps, ctx.shifted = eps, bias is not None
        if mean.ndim == 1:
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
        return _side_by_side(x, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight, own_mean, own_square = ctx.saved_tensors
        given, streams = x.shape, mean.shape[:-1]
        x, gradient = (torch.unflatten(t, 0, (-1, *streams)) for t in (x, gradient))
        axes, shape = [0, *range(1 + mean.ndim, x.ndim)], (1, *mean.shape, *(1,) * (x.ndim - 1 - mean.ndim))
        count = x.numel() // mean.numel()
        deviation = torch.rsqrt(variance + ctx.eps)
        total = gradient.sum(dim=axes, dtype=mean.dtype)
        along = (gradient * x).sum(dim=axes, dtype=mean.dtype) - mean * total
        scale = deviation if weight is None else deviation * weight
        own_variance = (own_square - own_mean.square()).clamp(min=0) + ctx.eps
        slope = -scale * along / (own_variance * count)
        offset = -scale * total / count - slope * own_mean
        if streams:  # many images: as few passes over them as possible
            inputs = torch.addcmul(offset.view(shape), x, slope.view(shape))
            inputs = torch.addcmul(inputs, gradient, scale.view(shape), out=torch.empty_like(x))
        else:
            inputs = gradient * scale.view(shape) + x * slope.view(shape) + offset.view(shape)
        weights = None if weight is None else along * deviation
        return inputs.reshape(given).to(x.dtype), None, None, weights, total if ctx.shifted else None, None, None, None


as_batch_norm: Callable[..., Tensor] = _AsBatchNorm.apply


def _side_by_side(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise images of several streams, (B·G,C,...), with statistics of each, (G,C)."""
    if x.is_contiguous():  # the channels of all streams beside each other, as if they were one image's
        joined = x.view(-1, mean.numel(), *x.shape[2:])
        scale, shift = (None if t is None else t.expand_as(mean).reshape(-1) for t in (weight, bias))
        return F.batch_norm(joined, mean.flatten(), variance.flatten(), scale, shift, False, 0.0, eps).view_as(x)
    scale = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (*mean.shape, *(1,) * (x.ndim - 2))
    out = torch.empty_like(x)  # written at once, though x may be in half precision and the statistics are not
    given, apart = (torch.unflatten(t, 0, (-1, len(mean))) for t in (x, out))
    torch.addcmul(shift.view(shape), given, scale.view(shape), out=apart)
    return out


def _normalise(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise with gradients through the statistics too."""
    scale = torch.rsqrt(variance + eps) if weight is None else weight * torch.rsqrt(variance + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return x * scale.view(shape).to(x.dtype) + shift.view(shape).to(x.dtype)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the mean square of every channel of every image, (N,C), in single precision at least."""
    precise = torch.promote_types(x.dtype, torch.float32)
    if x.ndim == 2:
        return x.to(precise), x.to(precise).square()
    axes, pixels = tuple(range(2, x.ndim)), x[0, 0].numel()
    mean = x.mean(dim=axes, dtype=precise)
    return mean, torch.linalg.vector_norm(x, dim=axes, dtype=precise).square() / pixels


def middle_mean(votes: Tensor) -> Tensor:
    """Return the mean over images (N,·) of every column's middle half."""
    images = votes.shape[-2]
    left_out = int(LEFT_OUT * images)
    return votes.sort(dim=-2).values[..., left_out : images - left_out, :].mean(dim=-2)
