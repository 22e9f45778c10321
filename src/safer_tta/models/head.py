"""The layers that turn features into class scores: how they are found, and how they are read as one linear map."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError, UnknownNameError
from . import norm as norms_of

JOIN = "+"  # stands between the names of layers whose scores are averaged


class JoinedHead(nn.Linear):
    """One linear map that is read off the layers of a model: several whose scores are averaged, or one of another kind.

    It owns nothing. Its features are those of its layers side by side, and its parameters are theirs.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        nn.Module.__init__(self)  # not that of Linear, which would make parameters
        self.layers = nn.ModuleList(layers)
        shapes = [matrix(layer).shape for layer in self.layers]
        self.in_features, self.out_features = sum(shape[1] for shape in shapes), shapes[0][0]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.cat([matrix(layer) for layer in self.layers], dim=1) / len(self.layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores (B,K) of features (B,d)."""
        parts = torch.split(features, [matrix(layer).shape[1] for layer in self.layers], dim=1)
        scores = [
            layer(part[..., None, None]).flatten(1) if isinstance(layer, nn.Conv2d) else layer(part)
            for layer, part in zip(self.layers, parts, strict=True)
        ]
        return torch.stack(scores).mean(dim=0)


def matrix(layer: nn.Module) -> Tensor:
    """Return the weight (K,d) of a layer; a 1×1 convolution has two more axes of length one."""
    return cast(Tensor, layer.weight).flatten(1)


def over_places(values: Tensor) -> Tensor:
    """Return one vector for each image: the mean over tokens (B,T,d) or over the places of a map (B,d,H,W)."""
    if values.ndim == 3:
        return values.mean(dim=1)
    return values.flatten(2).mean(dim=2) if values.ndim == 4 else values


def of(model: nn.Module, name: str) -> nn.Linear:
    """Return the head of this name, which may join several layers."""
    layers = [model.get_submodule(part) for part in name.split(JOIN)]
    return layers[0] if len(layers) == 1 and isinstance(layers[0], nn.Linear) else JoinedHead(layers)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return every layer that could be a head: it multiplies features by a matrix."""
    return {name: module for name, module in model.named_modules() if name and _is_matrix(module)}


def name_of(model: nn.Module, head: str | nn.Module | None) -> str | None:
    """Return the name of a head that may be given as a module of the model."""
    if head is None or isinstance(head, str):
        return head
    if not isinstance(head, nn.Module):
        raise InvalidTypeError(f"head is {head!r}; expected a layer of the model or its name")
    name: str
    for name, module in model.named_modules():
        if module is head and name:
            return name
    raise InvalidValueError(
        f"head is a {type(head).__name__} that is not a layer of this model; expected a layer of it, or its name"
    )


def find(model: nn.Module, head: str | nn.Module | None) -> tuple[str, bool]:
    """Return the name of the head, and whether the user or the model itself named it."""
    known = candidates(model)
    given = name_of(model, head)
    if given is not None:
        return _named(given, known), True
    offered = _offered(model, known)
    if offered:
        return offered, True
    linears = [name for name, layer in known.items() if not isinstance(layer, nn.Conv2d)] or list(known)
    if not linears:
        raise InvalidValueError(
            "no head found: the model has no nn.Linear layer. Expected features followed by a linear layer or a 1×1 "
            "convolution. If it is an image encoder, give it class prototypes: "
            "adapt(safer_tta.models.zero_shot(model, prototypes))"
        )
    return linears[-1], False


def check(model: nn.Module, name: str) -> None:
    """Refuse layers that cannot be one head: of different numbers of classes, or with a single score."""
    outputs = {part: len(matrix(model.get_submodule(part))) for part in name.split(JOIN)}
    if len(set(outputs.values())) > 1:
        raise InvalidValueError(f"the layers of head {name!r} give {outputs} scores; expected the same number of each")
    if 1 in outputs.values():
        raise InvalidValueError(
            f"head {name!r} returns one score, so the model is binary; expected a score for each class. Make it a head "
            "of two classes: "
            f"model.set_submodule({name!r}, safer_tta.models.binary_head(model.get_submodule({name!r})))"
        )


def binary_head(head: nn.Linear) -> nn.Linear:
    """Return a head of two classes for one with a single score s.

    Its scores are 0 and s, so the probability of class 1 is the sigmoid of s, as before.
    """
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise InvalidTypeError(f"head is {head}; expected an nn.Linear with one output")
    wide = nn.Linear(head.in_features, 2, bias=head.bias is not None).to(head.weight)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.copy_(torch.cat([torch.zeros_like(getattr(head, name)), getattr(head, name)]))
    return wide


def explanation(passed: Mapping[str, list[tuple[Tensor, Tensor]]], scores: Tensor) -> str:
    """Return the name of the head whose scores these are, from what entered and left each candidate; else ""."""
    once = {name: over_places(calls[0][1]) for name, calls in passed.items() if len(calls) == 1}
    fitting = {name: out for name, out in reversed(once.items()) if out.shape == scores.shape}
    for name, out in fitting.items():
        if same_scores(out, scores):
            return name
    for second, b in fitting.items():
        for first, a in fitting.items():
            if first != second and same_scores((a + b) / 2, scores):
                return JOIN.join(name for name in once if name in (first, second))
    return ""


def same_scores(found: Tensor, scores: Tensor) -> bool:
    """Whether scores give the same probabilities as those found, up to a temperature.

    Then they differ by one positive factor, and by a shift for each image: a softmax does not see the shift.
    """
    if found is scores or found.shape != scores.shape:
        return found is scores
    if torch.equal(found, scores):
        return True
    coarse = torch.bfloat16 in (found.dtype, scores.dtype)
    found, scores = (t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in (found, scores))
    centred, given = (t - t.mean(dim=1, keepdim=True) for t in (found, scores))
    if centred.numel() - len(centred) < 2:
        return False  # a factor always fits one number
    factor = (centred * given).sum() / centred.square().sum()
    exact = 1e-2 if coarse else 1e-4
    return bool(factor > 0) and bool((factor * centred - given).abs().max() <= exact * given.abs().max())


def is_probabilities(scores: Tensor, found: Tensor) -> bool:
    """Whether scores are probabilities: between 0 and 1, and of sum one or the sigmoids of what was found."""
    numbers = scores.detach().float()
    if not bool(((numbers >= 0) & (numbers <= 1)).all()):
        return False
    whole = torch.allclose(numbers.sum(dim=1), torch.ones(len(numbers), device=numbers.device), atol=1e-3)
    return whole or torch.allclose(numbers, found.detach().float().sigmoid(), atol=1e-3)


def _named(name: str, known: Mapping[str, nn.Module]) -> str:
    for part in name.split(JOIN):
        if part not in known:
            raise UnknownNameError.of("head", part, known)
    return name


def _offered(model: nn.Module, known: Mapping[str, nn.Module]) -> str:
    """Return the name of what timm's `get_classifier()` returns: a layer, a module that holds some, or several."""
    function = getattr(model, "get_classifier", None)
    offered: Any = function() if callable(function) else None
    parts = list(offered) if isinstance(offered, (tuple, list)) else [offered]
    inside = {id(module) for part in parts if isinstance(part, nn.Module) for module in part.modules()}
    found = [name for name, module in known.items() if id(module) in inside]
    if not found:
        return ""
    classes = len(matrix(known[found[-1]]))
    return JOIN.join(name for name in found if len(matrix(known[name])) == classes)


def _is_matrix(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    weight = module._parameters.get("weight")
    other = isinstance(module, nn.Embedding) or norms_of.is_norm(module) or len(module._modules) > 0
    return weight is not None and weight.ndim == 2 and not other
