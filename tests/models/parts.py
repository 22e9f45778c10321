"""Small models of every kind that can be packed, as their users have them on disk."""

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from safer_tta._internal import safetensors_io

importlib.import_module("tests.schemas")

CLASSES = ("cat", "dog", "owl", "bee")
SIDE = 32
OWN = """
from os import system  # what a file imports is not what it defines
from torch import nn


def make(width: int = 8) -> nn.Module:
    layers = nn.Conv2d(3, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(width, 4))


NUMBER = 3
"""


@dataclass
class Had:
    """What a user has: the model in memory, and what to type after `safer pack`."""

    model: nn.Module
    words: list[str]
    saving: dict[str, object] = field(default_factory=dict)  # what to tell `Classifier.save`
    code: Path | None = None  # a file of the user's own


def spread(model: nn.Module) -> nn.Module:
    """Give every tensor values of its own, so that one that is lost or doubled shows."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(0.5 + noise if "var" in name else tensor + 0.2 * (noise - 0.5))
    return model.eval()


NORMALISED = ["--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225"]


def had_timm(folder: Path) -> Had:
    import timm

    model = spread(timm.create_model("resnet10t", num_classes=len(CLASSES)))
    checkpoint = {"epoch": 3, "arch": "resnet10t", "state_dict": model.state_dict(), "args": argparse.Namespace(lr=0.1)}
    torch.save(checkpoint, folder / "model_best.pth.tar")
    words = ["timm:resnet10t", "--weights", str(folder / "model_best.pth.tar"), "--side", str(SIDE)]
    return Had(model, [*words, "--classes", ",".join(CLASSES)])


def had_torchvision(folder: Path) -> Had:
    import torchvision

    model = spread(torchvision.models.mobilenet_v3_small(num_classes=len(CLASSES)))
    torch.save(model.state_dict(), folder / "weights.pth")
    words = ["torchvision:mobilenet_v3_small", "--weights", str(folder / "weights.pth"), "--side", str(SIDE)]
    saving = {"architecture": "torchvision:mobilenet_v3_small", "arguments": {"num_classes": len(CLASSES)}}
    return Had(model, [*words, *NORMALISED, "--classes", ",".join(CLASSES)], saving)


def had_hugging_face(folder: Path) -> Had:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    names = dict(enumerate(CLASSES))
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=SIDE, patch_size=8,
        id2label=names, label2id={name: number for number, name in names.items()},
    )  # fmt: skip
    model = spread(ViTForImageClassification(config))
    model.save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}, image_mean=[0.4] * 3).save_pretrained(folder / "vit")
    return Had(model, [str(folder / "vit")])


def had_own(folder: Path) -> Had:
    code = folder / "my_models.py"
    code.write_text(OWN)
    namespace: dict[str, Callable[..., nn.Module]] = {}
    exec(OWN, namespace)
    model = spread(namespace["make"](width=12))
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, folder / "own.pth")
    words = [f"{code}:make", "--weights", str(folder / "own.pth"), "--argument", "width=12", "--side", str(SIDE)]
    saving = {"architecture": f"{code}:make", "arguments": {"width": 12}}
    return Had(model, [*words, *NORMALISED, "--classes", ",".join(CLASSES)], saving, code)


HAD = {"timm": had_timm, "torchvision": had_torchvision, "hugging_face": had_hugging_face, "own": had_own}


def rewritten(path: Path, tmp_path: Path, **changes: object) -> Path:
    """The file with another description, as somebody else could write it."""
    tensors, metadata = safetensors_io.read(path)
    inner = json.loads(metadata["packed"])
    inner |= {name: value for name, value in changes.items() if name != "architecture"}
    metadata |= {"packed": json.dumps(inner)} | {n: v for n, v in changes.items() if n == "architecture"}
    safetensors_io.write(tmp_path / "crafted.safetensors", tensors, metadata)
    return tmp_path / "crafted.safetensors"
