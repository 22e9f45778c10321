"""Normalisation layers at test time: whose statistics they use, and whether those move.

A batch norm in *eval* mode uses the statistics of source training. In *train* mode it uses those of the batch, and the
batch still moves the running ones. Without running statistics it uses those of the batch in both modes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from .._internal.registry import Registry
from .._internal.temporary import temporarily
from ..errors import InvalidValueError


class MedBN(nn.Module):
    """Median batch normalisation (Park et al., CVPR 2024): a few poisoned images cannot move a median far.

    Over batch and space, m is the median of a channel (the lower one of two) and v is the mean of (x - m)². There are
    no running statistics.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.behind = nn.Sequential(*_behind(norm))

    @classmethod
    def like(cls, norm: nn.Module) -> nn.Module:
        """Return the median version of a batch norm; other layers stay as they are."""
        return cls(norm) if isinstance(norm, _BatchNorm) else norm

    def forward(self, x: Tensor) -> Tensor:
        per_channel = (1, -1, *(1,) * (x.ndim - 2))
        median = x.transpose(0, 1).flatten(1).median(dim=1).values.view(per_channel)
        centred = x - median
        others = [axis for axis in range(x.ndim) if axis != 1]
        out = centred * torch.rsqrt(centred.square().mean(dim=others, keepdim=True) + self.eps)
        if self.weight is not None:
            out = out * self.weight.view(per_channel)
        if self.bias is not None:
            out = out + self.bias.view(per_channel)
        return self.behind(out)  # type: ignore[no-any-return]


def _behind(norm: nn.Module) -> list[nn.Module]:
    """Return the layers inside a batch norm that run after normalising: timm's have a drop-out and an activation."""
    behind = [m for m in (getattr(norm, name, None) for name in ("drop", "act")) if isinstance(m, nn.Module)]
    if type(norm) not in _PLAIN and not behind:
        raise InvalidValueError(
            f"{type(norm).__name__} is a batch norm with a forward of its own, so it cannot be replaced; expected "
            "nn.BatchNorm1d, 2d or 3d"
        )
    return behind


_PLAIN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
N = TypeVar("N", bound=nn.BatchNorm2d)


def successor(kind: type[N], norm: nn.Module, momentum: float) -> nn.Module:
    """Return a layer of another kind with the state of a 2-d batch norm; other layers stay as they are."""
    if not isinstance(norm, nn.BatchNorm2d):
        return norm
    if norm.running_mean is None or norm.running_var is None:
        raise InvalidValueError("a batch norm has no running statistics; expected track_running_stats=True")
    behind = _behind(norm)
    new = kind(norm.num_features, eps=norm.eps, momentum=momentum, affine=norm.affine)
    new.load_state_dict({name: tensor for name, tensor in norm.state_dict().items() if "." not in name})
    new = new.to(norm.running_mean.device, norm.running_mean.dtype).eval()
    return nn.Sequential(new, *behind) if behind else new


LAYERS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, MedBN)


@dataclass(frozen=True)
class Norm:
    """What may replace the batch norms of a model."""

    name: str
    function: Callable[[nn.Module], nn.Module]  # returns another layer for a layer, or the same one
    version: int = 1  # raised when its layers change; a part of the names of runs


NORMS: Registry[Norm] = Registry("norm", Norm)
NORMS.register("medbn")(MedBN.like)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, LAYERS)


def use_batch(norms: Iterable[nn.Module]) -> bool:
    """Whether any batch norm uses the statistics of the batch as it is set now."""
    return any(isinstance(n, _BatchNorm) and (n.training or n.running_mean is None) for n in norms)


def use_batch_statistics(norms: Iterable[nn.Module]) -> None:
    """Drop the running statistics, so that batch norms use the batch in train and in eval mode."""
    for norm in norms:
        if isinstance(norm, _BatchNorm):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def use_train_mode(norms: Iterable[nn.Module]) -> None:
    """Normalise with the batch and keep updating the running statistics; drop-out stays off."""
    for norm in norms:
        if isinstance(norm, _BatchNorm):
            norm.train()


def moving_norms(norms: Iterable[nn.Module]) -> list[_BatchNorm]:
    """Return the batch norms whose running statistics a forward pass would move."""
    return [n for n in norms if isinstance(n, _BatchNorm) and n.training and n.track_running_stats]


def describe_statistics(norm: nn.Module) -> str:
    """Return in words which statistics a layer normalises with."""
    if isinstance(norm, MedBN):
        return "medians of the batch"
    if not isinstance(norm, _BatchNorm):
        return "statistics of each image"
    if norm.running_mean is None:
        return "statistics of the batch"
    return "statistics of the batch, moving the running ones" if norm.training else "running statistics"


def untracked(norms: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Inside, a forward pass in train mode uses the batch's statistics but moves no running statistic."""
    return temporarily(moving_norms(norms), track_running_stats=False)


def running_statistics(norms: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Inside, batch norms in train mode use their running statistics instead of the batch's."""
    training = [n for n in norms if isinstance(n, _BatchNorm) and n.training]
    return temporarily([layer for norm in training for layer in norm.modules()], training=False)


def again(norms: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Record the modes of batch norms now; inside, they have these modes and move no running statistic."""
    return _again([(n, n.training, n.track_running_stats) for n in norms if isinstance(n, _BatchNorm)])


@contextlib.contextmanager
def _again(modes: list[tuple[_BatchNorm, bool, bool]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for norm, training, tracking in modes:
            stack.enter_context(temporarily([norm], training=training, track_running_stats=tracking))
            for buffer in norm.buffers(recurse=False):
                stack.callback(buffer.data.copy_, buffer.clone())  # .data: a graph that has saved it stays valid
        yield
