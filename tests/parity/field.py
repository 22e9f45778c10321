"""Shared by the tests of methods against their updates: a small model in double precision, and one step of learning."""

from __future__ import annotations

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
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
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


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def agree(ours: safer_tta.Method, model: nn.Module) -> None:
    exported = dict(ours.export().named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=1e-6), name


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b.detach(), rtol=0, atol=1e-6)
