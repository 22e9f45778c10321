"""CLIP and its relatives as classifiers: an image encoder, and one text feature for every class."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError

SCALE = 100.0  # CLIP's, where the model does not carry its own


class ZeroShot(nn.Module):
    """Scores are scaled cosines between the feature of an image and the text features of the classes.

    The unit-norm image feature is what enters the head; the rows of the head are the scaled text features.
    """

    def __init__(self, encoder: nn.Module, text_features: Tensor, scale: float, config: Any = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config  # where Hugging Face says how images are normalised
        classes, size = text_features.shape
        self.head = nn.Linear(size, classes, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(scale * F.normalize(text_features.detach().float(), dim=1))

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (B,K) of normalised images."""
        features = _feature(self.encoder(images))
        scores: Tensor = self.head(F.normalize(features, dim=1))
        return scores


def zero_shot(image_encoder: nn.Module, text_features: Tensor, *, scale: float | None = None) -> ZeroShot:
    """Return a classifier that compares images with texts: one text feature for every class.

    Args:
        image_encoder: A CLIP model of open_clip or of Hugging Face, of which only the image tower is kept; or any
            module that maps images to features (B,d), such as an image tower on its own.
        text_features: (K,d), for instance `model.encode_text(tokens)`. They need not have unit norm.
        scale: What cosines are multiplied with. By default it is the model's own `logit_scale`, or else 100.

    Returns:
        A module for `safer_tta.adapt`.

    Raises:
        InvalidTypeError: If the encoder is not a module, or the text features are not a matrix of floats.
        InvalidValueError: If there are fewer than two classes.
    """
    if not isinstance(image_encoder, nn.Module):
        raise InvalidTypeError(f"image_encoder is a {type(image_encoder).__name__}; expected a torch.nn.Module")
    if not isinstance(text_features, Tensor) or text_features.ndim != 2 or not text_features.is_floating_point():
        came = tuple(text_features.shape) if isinstance(text_features, Tensor) else type(text_features).__name__
        raise InvalidTypeError(f"text_features are {came}; expected floats (K,d), one row for each class")
    if len(text_features) < 2:
        raise InvalidValueError(f"text_features are {tuple(text_features.shape)}; expected at least two classes")
    own = getattr(image_encoder, "logit_scale", None)
    if scale is None:
        scale = float(own.detach().exp()) if isinstance(own, Tensor) else SCALE
    made = ZeroShot(_tower(image_encoder), text_features, scale, getattr(image_encoder, "config", None))
    reference = next(made.encoder.parameters(), text_features)
    made.head.to(reference.device, reference.dtype)
    return made


class _Projected(nn.Module):
    """The image tower of a Hugging Face model, and the projection that stands behind it."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, images: Tensor) -> Any:
        return self.projection(self.tower(pixel_values=images).pooler_output)


def _tower(model: nn.Module) -> nn.Module:
    """Return the part of a model that encodes images; the part for texts must neither learn nor be copied."""
    visual, vision = getattr(model, "visual", None), getattr(model, "vision_model", None)
    if isinstance(visual, nn.Module) and hasattr(model, "encode_image"):
        return visual
    if isinstance(vision, nn.Module) and hasattr(model, "get_image_features"):
        projection = getattr(model, "visual_projection", None)
        return _Projected(vision, projection if isinstance(projection, nn.Module) else nn.Identity())
    return model


def _feature(output: Any) -> Tensor:
    """Return the feature (B,d) in the output of an encoder."""
    for name in ("image_embeds", "pooler_output"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found.flatten(1)
    found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(found, Tensor) or found.ndim != 2:
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InvalidTypeError(f"the image encoder returned {came}; expected one feature for each image, (B,d)")
    return found
