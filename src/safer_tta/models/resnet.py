"""Residual networks (He et al., 2016) with the parameter names of torchvision, so that its checkpoints fit.

`stride_on_first` puts the stride of a bottleneck on its first 1×1 convolution, as the original networks have it;
torchvision has it on the 3×3 convolution.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class _Block(nn.Module):
    """A residual branch and its shortcut."""

    expansion = 1
    downsample: nn.Module | None

    def _short_cut(self, inputs: int, outputs: int, stride: int) -> nn.Module | None:
        if stride == 1 and inputs == outputs:
            return None
        return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        return F.relu(self.branch(x) + short)

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class BasicBlock(_Block):
    def __init__(self, inputs: int, width: int, stride: int, stride_on_first: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = self._short_cut(inputs, width, stride)

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))  # type: ignore[no-any-return]


class Bottleneck(_Block):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, stride_on_first: bool) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_on_first else (1, stride)
        self.conv1, self.bn1 = _conv(inputs, width, 1, first), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, second), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.downsample = self._short_cut(inputs, 4 * width, stride)

    def branch(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem, four stages, a global average and a linear head."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        *,
        num_classes: int = 1000,
        width: int = 64,
        stride_on_first: bool = False,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        stem, pool = (3, nn.Identity()) if small_images else (7, nn.MaxPool2d(3, stride=2, padding=1))
        self.conv1, self.bn1 = _conv(3, width, stem, stride=2), nn.BatchNorm2d(width)
        self.maxpool = pool
        inputs = width
        for stage, depth in enumerate(layers):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(inputs, width << stage, stride, stride_on_first))
                inputs = (width << stage) * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def small(num_classes: int = 1000) -> ResNet:
    """Build the network of the embedded data: 16 to 128 channels, for images of about 64 pixels."""
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=num_classes, width=16, small_images=True)


def resnet18(num_classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes)


def resnet34(num_classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes=num_classes)


def resnet50(num_classes: int = 1000, *, stride_on_first: bool = False) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes, stride_on_first=stride_on_first)
