"""Compare methods with the updates of their papers, written down step by step for a plain model."""

from __future__ import annotations

import copy
import inspect
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import safer_tta
from safer_tta import methods
from safer_tta.models.norm import MedBN
from safer_tta.predictors import TRANSFORMS
from tests.conftest import batches, small_net


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


# The constants of the methods' papers, which the docstring of every method's file repeats.
DEFAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "bn": {},
    "tent": {"lr": 1e-3},
    "pl": {"lr": 1e-4, "threshold": 0.9},
    "shot_im": {"lr": 1e-4},
    "t3a": {"keep": 100},
    "tsd": {"lr": 1e-4, "keep": 100, "released": False},
    "eata": {"lr": 2.5e-4, "margin": 0.4, "redundancy": 0.05, "momentum": 0.9, "fisher": 2000},
    "tesla": {"lr": 1e-4, "keep": 0.99, "easy_views": 4, "queue": 256, "neighbours": 10, "policy_lr": 0.1},
    "memo": {"lr": 2.5e-4, "copies": 32},
    "note": {"lr": 1e-4, "capacity": 64, "every": 64, "momentum": 0.01},
    "sotta": {"lr": 1e-3, "threshold": 0.99, "capacity": 64, "every": 64, "momentum": 0.2, "radius": 0.05},
    "rotta": {"lr": 1e-3, "capacity": 64, "every": 64, "momentum": 0.05, "keep": 0.999},
    "sar": {"lr": 2.5e-4, "margin": 0.4, "radius": 0.05, "recovery": 0.2},
    "cotta": {"lr": 1e-3, "keep": 0.999, "restore_rate": 0.01, "threshold": 0.92, "versions": 32},
    "rdumb": {"lr": 2.5e-4, "margin": 0.4, "redundancy": 0.05, "momentum": 0.9, "every": 1000},
}


@pytest.mark.parametrize("method", methods.METHODS)
def test_defaults_are_the_published_ones(method):
    options = inspect.signature(methods.METHODS[method]).parameters.values()
    assert {option.name: option.default for option in options if option.name != "predictor"} == DEFAULTS[method]


def test_tent_minimises_entropy():
    source = small_net().double()
    ours = safer_tta.adapt(source, "tent", "plain")

    model = copy.deepcopy(source).eval()
    for norm in norms(model):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    optimizer = torch.optim.Adam([p for n in norms(model) for p in (n.weight, n.bias)], lr=1e-3)
    for images in batches(5):
        images = images.double()
        logits = model(images)
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.allclose(ours(images).logits, logits.detach(), rtol=0, atol=1e-6)
    for (name, a), (_, b) in zip(ours.export().named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6), name


def test_pl_learns_from_confident_images():
    source = small_net().double()
    ours = safer_tta.adapt(source, "pl", "plain")

    model = copy.deepcopy(source).train()
    model.dropout.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for images in batches(5):
        images = images.double()
        logits = model(images)
        confidence, label = logits.softmax(1).max(1)
        keep = confidence > 0.9
        assert 0 < keep.sum() < len(keep), "this test needs confident and unconfident images"
        optimizer.zero_grad()
        F.cross_entropy(logits[keep], label[keep]).backward()
        optimizer.step()
        assert torch.allclose(ours(images).logits, logits.detach(), rtol=0, atol=1e-6)
    exported = ours.export().state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(exported[name], tensor, rtol=0, atol=1e-6), name


def test_bn_uses_the_batch_and_moves_the_running_statistics():
    source = small_net().double()
    ours = safer_tta.adapt(source, "bn", "plain")
    model = copy.deepcopy(source).train()
    model.dropout.eval()
    for images in batches(3):
        assert torch.allclose(ours(images).logits, model(images.double()).detach(), rtol=0, atol=1e-9)
    exported = ours.export().state_dict()
    assert all(torch.allclose(exported[name], tensor) for name, tensor in model.state_dict().items())


def test_none_is_the_source_model_in_eval_mode():
    source = small_net().double()
    ours = safer_tta.adapt(source, "none", "plain")
    for images in batches(2):
        assert torch.equal(ours(images).logits, copy.deepcopy(source).eval()(images.double()).detach())


@pytest.mark.parametrize("method", ["pl", "shot_im", "tsd", "bn"])
def test_train_mode_is_for_batch_norms_only(method):
    """Another norm with running statistics keeps those of the source, and dropout stays off."""
    source = small_net().double()
    source.norm2 = nn.InstanceNorm2d(16, affine=True, track_running_stats=True, dtype=torch.float64)
    nn.init.uniform_(source.norm2.running_mean, -0.2, 0.2)
    model = copy.deepcopy(source).eval()
    model.norm1.train()
    images = batches(1)[0].double()
    ours = safer_tta.adapt(source, method, "plain")
    assert torch.allclose(ours(images).logits, model(images).detach(), rtol=0, atol=1e-9)
    assert torch.equal(ours.export().norm2.running_mean, source.norm2.running_mean)


def medbn(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        values = sorted(x[:, c].flatten().tolist())
        median = values[(len(values) - 1) // 2]
        variance = sum((v - median) ** 2 for v in values) / len(values)
        out[:, c] = (x[:, c] - median) / (variance + norm.eps) ** 0.5 * norm.weight[c] + norm.bias[c]
    return out


def test_medbn_normalises_about_the_lower_median():
    norm = nn.BatchNorm2d(4).double()
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    x = torch.randn(5, 4, 3, 4, dtype=torch.float64) ** 3
    assert torch.allclose(MedBN.like(norm)(x), medbn(norm, x), rtol=0, atol=1e-10)


def test_tent_with_medbn_replaces_every_batch_norm():
    source = small_net().double()
    ours = safer_tta.adapt(source, "tent", "plain", norm="medbn")
    images = batches(1)[0].double()
    model = copy.deepcopy(source).eval()
    for norm in norms(model):
        norm.forward = lambda x, norm=norm: medbn(norm, x)
    assert torch.allclose(ours(images).logits, model(images).detach(), atol=1e-9)
    assert ours.state_bytes > 0


def test_jpeg_is_close_to_a_real_codec():
    noise = torch.rand(1, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    image = (F.interpolate(noise, (70, 90), mode="bicubic").clamp(0, 1) * 255).round() / 255
    buffer = io.BytesIO()
    pixels = (image[0].permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=50)
    codec = np.asarray(Image.open(buffer).convert("RGB")).astype(float)
    ours = TRANSFORMS["jpeg"](image)[0].permute(1, 2, 0).numpy() * 255
    untouched = np.abs(pixels - codec).mean()
    assert np.abs(ours - codec).mean() < 0.25 * untouched
