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
from .stream_norm import StreamNorm
from .window import Window

CHANNELS_AT_ONCE = 8  # of which the medians are found


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
        # A few channels at a time: the median of all would copy and sort the whole input.
        few = [part.transpose(0, 1).flatten(1).median(dim=1).values for part in torch.split(x, CHANNELS_AT_ONCE, dim=1)]
        median = torch.cat(few).view(per_channel)
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
            "nn.BatchNorm1d, 2d or 3d. norm='model' keeps it"
        )
    return behind


_PLAIN = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
N = TypeVar("N", bound=nn.BatchNorm2d)


def successor(kind: type[N], norm: nn.Module, momentum: float) -> nn.Module:
    """Return a layer of another kind with the state of a 2-d batch norm; other layers stay as they are."""
    if isinstance(norm, StreamNorm):
        raise InvalidValueError(
            "the method brings batch norms of its own, which replace those of norm 'stream'; leave norm out"
        )
    if not isinstance(norm, nn.BatchNorm2d):
        return norm
    if norm.running_mean is None or norm.running_var is None:
        raise InvalidValueError("a batch norm has no running statistics; expected track_running_stats=True")
    behind = _behind(norm)
    new = kind(norm.num_features, eps=norm.eps, momentum=momentum, affine=norm.affine)
    new.load_state_dict({name: tensor for name, tensor in norm.state_dict().items() if "." not in name}, strict=False)
    new = new.to(norm.running_mean.device, norm.running_mean.dtype).eval()
    return nn.Sequential(new, *behind) if behind else new


BATCH_NORMS = (_BatchNorm, StreamNorm)  # those that can normalise with the batch or with the source
LAYERS = (*BATCH_NORMS, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, MedBN)


@dataclass(frozen=True)
class Norm:
    """What may replace the batch norms of a model."""

    name: str
    function: Callable[..., nn.Module]  # returns another layer for a layer, or the same one
    follows: bool = False  # whether it follows the stream; the function is then given the shared Window too
    version: int = 1  # raised when its layers change; a part of the names of runs


NORMS: Registry[Norm] = Registry("norm", Norm)
NORMS.register("medbn")(MedBN.like)


@NORMS.register("stream", follows=True, version=3)
def follow_stream(norm: nn.Module, window: Window) -> nn.Module:
    """Return the version of a batch norm that follows the stream; layers without source statistics stay as they are."""
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None:
        return norm
    return StreamNorm(norm, window, _behind(norm))


@NORMS.register("model")
def keep(norm: nn.Module) -> nn.Module:
    """Return the layer itself, for a predictor that would replace it otherwise."""
    return norm


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, LAYERS)


def use_batch(norms: Iterable[nn.Module]) -> bool:
    """Whether any batch norm uses the statistics of the batch as it is set now."""
    return any(isinstance(n, _BatchNorm) and (n.training or n.running_mean is None) for n in norms)


SOURCE = "source_statistics"  # the attribute under which dropped statistics are kept


class _Source:
    """The running statistics of a batch norm from before they were dropped."""

    def __init__(self, norm: _BatchNorm) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in norm.named_buffers(recurse=False)}

    def restore(self, norm: _BatchNorm) -> None:
        device = None if norm.weight is None else norm.weight.device
        for name, tensor in self.tensors.items():
            setattr(norm, name, tensor.to(device, copy=True))
        norm.track_running_stats = True


def use_batch_statistics(norms: Iterable[nn.Module]) -> None:
    """Drop the running statistics, so that batch norms use the batch in train and in eval mode."""
    for norm in norms:
        if isinstance(norm, StreamNorm):
            norm.follows = True
        elif isinstance(norm, _BatchNorm):
            if norm.running_mean is not None:
                vars(norm)[SOURCE] = _Source(norm)
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def use_train_mode(norms: Iterable[nn.Module]) -> None:
    """Normalise with the batch and keep updating the running statistics; drop-out stays off."""
    for norm in norms:
        if isinstance(norm, StreamNorm):
            norm.follows = True
        elif isinstance(norm, _BatchNorm):
            norm.train()


def moving_norms(norms: Iterable[nn.Module]) -> list[_BatchNorm]:
    """Return the batch norms whose running statistics a forward pass would move."""
    return [n for n in norms if isinstance(n, _BatchNorm) and n.training and n.track_running_stats]


def describe_statistics(norm: nn.Module) -> str:
    """Return in words which statistics a layer normalises with."""
    if isinstance(norm, MedBN):
        return "medians of the batch"
    if isinstance(norm, StreamNorm):
        return "statistics of source, stream and batch" if norm.follows else "statistics of source and stream"
    if not isinstance(norm, _BatchNorm):
        return "statistics of each image"
    if norm.running_mean is None:
        return "statistics of the batch"
    return "statistics of the batch, moving the running ones" if norm.training else "running statistics"


def export(model: nn.Module) -> str:
    """Give all norms of a model statistics that are right on single images; return what could not be given, in words.

    Layers that follow a stream become ordinary batch norms again, and dropped running statistics come back.
    """
    trouble = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, StreamNorm):
            model.set_submodule(name, module.folded())
        elif isinstance(module, MedBN):
            trouble.append("its norms use medians of each batch, so an answer depends on the other images")
        elif isinstance(module, _BatchNorm) and SOURCE in vars(module):
            vars(module).pop(SOURCE).restore(module)
            trouble.append(
                "its norms adapted with the statistics of each batch, and these are not known for single images; "
                "they now use those of source training, so it answers otherwise than the method did"
            )
    return next(iter(trouble), "")


def exact_gradients(norms: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Inside, gradients are those of what is computed, as an attacker wants them; norm "stream" has others."""
    return temporarily([n for n in norms if isinstance(n, StreamNorm)], exact=True)


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
