"""Shared by the tests of methods against their updates: a small model in double precision, and one step of learning."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import safer_tta
from tests.conftest import batches, small_net

SEED = 11
MIXED_SIZES = [[6] * 5, [1] * 5, [2] * 5, [64, 64, 9]]


def source() -> nn.Module:
    return small_net().double()


def stream(sizes: list[int]) -> list[Tensor]:
    return [batches(1, size=n, seed=20 + i)[0].double() for i, n in enumerate(sizes)]


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def affine(model: nn.Module) -> list[nn.Parameter]:
    return [p for n in norms(model) for p in (n.weight, n.bias)]


def batch_statistics(model: nn.Module) -> nn.Module:
    model.eval()
    for norm in norms(model):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model


def train_mode(model: nn.Module) -> nn.Module:
    model.train()
    model.dropout.eval()
    return model


def features(model: nn.Module, x: Tensor) -> Tensor:
    caught = []
    hook = model.fc.register_forward_hook(lambda m, i, o: caught.append(i[0]))
    model(x)
    hook.remove()
    return caught[0]


def h(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


@contextlib.contextmanager
def at_the_worst_point_nearby(parameters: list[nn.Parameter]) -> Iterator[None]:
    length = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters))
    here = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p += 0.05 * p.grad / (length + 1e-12)
    yield
    with torch.no_grad():
        for p, value in zip(parameters, here, strict=True):
            p.copy_(value)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def agree(ours: safer_tta.Method, model: nn.Module, tolerance: float = 1e-6) -> None:
    """The parameters, and the running statistics where the written-out model has some."""
    exported = ours.export().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=tolerance), name


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.detach(), rtol=0, atol=1e-6)
