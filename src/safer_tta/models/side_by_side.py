"""A model through which batches of several streams pass side by side, each with scale, shift and statistics of its own.

Most of a model is the same for all streams: what adapts are its norms. Every tensor that differs gets a first dimension
of streams, G, and an image of each stream comes in turn, (V,B,G,...). Nothing is computed across streams.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidValueError
from .classifier import Classifier
from .norm import MedBN, moving_norms
from .stream_norm import StreamNorm

CLOSE = {"float32": 1e-3, "bfloat16": 5e-2}  # how far features may differ, as a share of the largest, by precision
AFFINE = ("weight", "bias")
RUNNING = ("running_mean", "running_var")


class Crowd:
    """How many streams pass at once, and how many images with all their views."""

    streams = images = 1


class SideBySide:
    """A copy of a classifier that shares every tensor with it but those that adapt; `put` sets these for each stream.

    Raises:
        InvalidValueError: If the model has a layer that cannot keep streams apart.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.crowd = Crowd()
        shared = {id(tensor): tensor for tensor in (*classifier.parameters(), *classifier.buffers())}
        self.classifier = copy.deepcopy(classifier, shared)
        if moving_norms(self.classifier.norms()):
            raise InvalidValueError("batch norms move running statistics, which cannot be kept apart by stream")
        self.classifier.replace_norms(self._keep_apart)

    def put(self, tensors: Mapping[str, Tensor], streams: int, images: int) -> None:
        """Expect so many images of so many streams, and take the adapted tensors, (G,·), by their names."""
        self.crowd.streams, self.crowd.images = streams, images
        for name, tensor in tensors.items():
            path, _, attribute = name.rpartition(".")
            setattr(self.classifier.get_submodule(path), attribute, tensor)

    def _keep_apart(self, norm: nn.Module) -> nn.Module:
        """Return the version of a norm that treats streams separately."""
        if isinstance(norm, StreamNorm):  # it does so by itself
            _without_affine(norm)
            return norm
        if isinstance(norm, (_BatchNorm, MedBN)):
            return OfChannels(norm, self.crowd)
        if any(parameter.requires_grad for parameter in norm.parameters(recurse=False)):
            return OfImages(norm, self.crowd)
        return norm

    @torch.no_grad()
    def agrees_with(self, classifier: Classifier, side: int) -> bool:
        """Whether it finds the features that the classifier finds, after `put` has given it that one's own tensors."""
        like, draw = next(classifier.parameters()), torch.Generator().manual_seed(0)
        shape = self.crowd.streams, self.crowd.images // self.crowd.streams, max(classifier.channels or {3}), side, side
        batches = torch.rand(shape, generator=draw).to(like)
        with classifier.untracked(), self.classifier.untracked():
            wanted = torch.stack([classifier.features(batch) for batch in batches], dim=1)
            found = self.classifier.features(batches.transpose(0, 1).flatten(0, 1)).view_as(wanted)
        return float((found - wanted).abs().max()) <= CLOSE[classifier.precision] * float(wanted.abs().max())


class OfChannels(nn.Module):
    """A norm of channels: those of all streams stand beside each other, as if they were one image's."""

    def __init__(self, norm: nn.Module, crowd: Crowd) -> None:
        super().__init__()
        self.norm, self._crowd = norm, crowd
        self.weight, self.bias = _without_affine(norm)
        self._running = {name: getattr(norm, name) for name in RUNNING if getattr(norm, name, None) is not None}

    def forward(self, x: Tensor) -> Tensor:
        streams = self._crowd.streams
        for name, tensor in {"weight": self.weight, "bias": self.bias, **self._running}.items():
            if tensor is not None:
                setattr(self.norm, name, tensor.repeat(streams) if tensor.ndim == 1 else tensor.flatten())
        out: Tensor = self.norm(x.reshape(-1, streams * x.shape[1], *x.shape[2:]))
        return out.reshape(x.shape)


class OfImages(nn.Module):
    """A norm that treats every image by itself: only scale and shift differ."""

    def __init__(self, norm: nn.Module, crowd: Crowd) -> None:
        super().__init__()
        self.norm, self._crowd = norm, crowd
        self.weight, self.bias = _without_affine(norm)
        self._last = isinstance(norm, (nn.LayerNorm, nn.RMSNorm))  # whether the last dimensions have a scale each

    def forward(self, x: Tensor) -> Tensor:
        streams, images = self._crowd.streams, self._crowd.images
        out: Tensor = self.norm(x)
        apart = torch.unflatten(out, 0, (images // streams, streams, -1))  # an image may be in parts, as windows of it
        if self.weight is not None:
            apart = apart * self._beside(self.weight, apart)
        if self.bias is not None:
            apart = apart + self._beside(self.bias, apart)
        return apart.flatten(0, 2)

    def _beside(self, tensor: Tensor, apart: Tensor) -> Tensor:
        ones = (1,) * (apart.ndim - 2 - tensor.ndim)
        shape = (*ones, *tensor.shape[1:]) if self._last else (*tensor.shape[1:], *ones)
        return tensor.view(len(tensor), 1, *shape)


def _without_affine(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Make scale and shift of a norm plain tensors, since a parameter could only be replaced by one; return them."""
    taken = [getattr(norm, name, None) for name in AFFINE]
    weight, bias = (None if tensor is None else tensor.detach() for tensor in taken)
    for name, tensor in zip(AFFINE, (weight, bias), strict=True):
        norm._parameters.pop(name, None)
        setattr(norm, name, tensor if isinstance(norm, StreamNorm) else None)
    return weight, bias
