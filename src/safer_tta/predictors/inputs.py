"""Refuse what is not a batch of images in [0,1], and say how to make it one."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError

KEY = "pixel_values"  # of Hugging Face's batches


def take_images(batch: Any, key: str | None = None) -> Any:
    """Return the images in a batch of a loader: the first of several, or those under a key of a dict."""
    if isinstance(batch, Mapping):
        wanted = KEY if key is None else key
        if wanted not in batch:
            raise InvalidValueError(
                f"a batch has {', '.join(map(repr, batch))} and no {wanted!r}; expected images there. Give the key "
                "that they have: key=..."
            )
        return batch[wanted]
    if key is not None:
        raise InvalidTypeError(f"key is {key!r} and a batch is a {type(batch).__name__}; expected a dict, or no key")
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def check_images(images: Any, *, values: bool = True, channels: Collection[int] = (3,)) -> None:
    """Refuse what is not a batch of images; looking at the values too costs one reduction.

    Args:
        images: What came.
        values: Whether to look at the values.
        channels: How many channels images may have; empty if any number will do.
    """
    if not isinstance(images, Tensor):
        raise InvalidTypeError(
            f"images are {type(images).__name__}; expected a torch.Tensor (B,3,H,W). {_advice_on_type(images)}"
        )
    if images.ndim != 4 or 0 in images.shape or (channels and images.shape[1] not in channels):
        wanted = " or ".join(map(str, sorted(channels))) or "C"
        raise InvalidValueError(
            f"images have shape {tuple(images.shape)}; expected (B,{wanted},H,W) with at least one image. "
            f"{_advice_on_shape(images, channels)}".rstrip()
        )
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise InvalidTypeError(f"images are {images.dtype}; expected uint8 in 0..255 or floats in [0,1]")
    if values:
        _check_values(images)


def check_not_normalised(images: Tensor) -> None:
    """Refuse images that were normalised before, which lie far below 0: the model would normalise them again."""
    if images.is_floating_point() and float(images.detach().amin()) < -0.1:
        _check_values(images)


def _check_values(images: Tensor) -> None:
    lowest, highest = (bound.item() for bound in torch.aminmax(images.detach()))
    if lowest >= 0 and highest <= 1:
        return
    if not bool(torch.isfinite(images).all()):
        raise InvalidValueError("images hold NaN or Inf; expected floats in [0,1]. Look for it where they are decoded")
    advice = "Pass uint8, or divide by 255; declare normalisation with adapt(model, mean=..., std=...)"
    if lowest > -0.1 and highest < 1.1:
        advice = "After resizing or rounding: images.clamp(0, 1)"
    raise InvalidValueError(
        f"images lie in [{lowest:.8g}, {highest:.8g}]; expected [0,1] before any normalisation. {advice}"
    )


def _advice_on_type(images: Any) -> str:
    if isinstance(images, Mapping):
        return f"Take them out of the batch: batch[{next((k for k in images if k == KEY), next(iter(images), KEY))!r}]"
    if isinstance(images, (tuple, list)):
        return "A batch of a DataLoader: batch[0]. A list of images: torch.stack(images)"
    if type(images).__name__ == "ndarray":
        return "torch.from_numpy(images)"
    return ""


def _advice_on_shape(images: Tensor, channels: Collection[int]) -> str:
    if images.ndim == 3:
        return "One image: images.unsqueeze(0)"
    if images.ndim != 4:
        return ""
    if images.shape[3] in channels:
        return "Channels last: images.permute(0, 3, 1, 2)"
    if images.shape[1] == 1 and 3 in channels:
        return "Grey images: images.expand(-1, 3, -1, -1)"
    if images.shape[1] == 4 and 3 in channels:
        return "Four channels: drop the alpha channel, images[:, :3]"
    if images.shape[1] == 3 and 1 in channels:
        return "The model takes grey images: images.mean(dim=1, keepdim=True)"
    return ""
