"""Refuse what is not a batch of images in [0,1], and say how to make it one."""

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError


def check_images(images: Any, *, values: bool = True) -> None:
    """Refuse what is not a batch of images; looking at the values too costs one reduction."""
    if not isinstance(images, Tensor):
        raise InvalidTypeError(f"images are {type(images).__name__}; expected a torch.Tensor (B,3,H,W)")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise InvalidValueError(
            f"images have shape {tuple(images.shape)}; expected (B,3,H,W) with at least one image. "
            f"{_advice_on_shape(images)}"
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise InvalidTypeError(f"images are {images.dtype}; expected uint8 in 0..255 or floats in [0,1]")
    if values:
        _check_values(images)


def _check_values(images: Tensor) -> None:
    lowest, highest = (bound.item() for bound in torch.aminmax(images.detach()))
    if lowest >= 0 and highest <= 1:
        return
    if not bool(torch.isfinite(images).all()):
        raise InvalidValueError("images hold NaN or Inf; expected floats in [0,1]. Look for it where they are decoded")
    advice = "Pass uint8, or divide by 255; declare normalisation with Classifier(model, mean=..., std=...)"
    if lowest > -0.1 and highest < 1.1:
        advice = "After resizing or rounding: images.clamp(0, 1)"
    raise InvalidValueError(
        f"images lie in [{lowest:.8g}, {highest:.8g}]; expected [0,1] before any normalisation. {advice}"
    )


def _advice_on_shape(images: Tensor) -> str:
    if images.ndim == 3:
        return "One image: images.unsqueeze(0)"
    if images.ndim == 4 and images.shape[3] == 3:
        return "Channels last: images.permute(0, 3, 1, 2)"
    if images.ndim == 4 and images.shape[1] == 1:
        return "Grey images: images.expand(-1, 3, -1, -1)"
    if images.ndim == 4 and images.shape[1] == 4:
        return "Four channels: drop the alpha channel, images[:, :3]"
    return ""
