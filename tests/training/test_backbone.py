"""The small pretrained network that ships with the package."""

from __future__ import annotations

from safer_tta._internal import safetensors_io
from safer_tta.training.backbone import SHIPPED


def test_the_backbone_is_shipped_and_small():
    assert SHIPPED.stat().st_size < 1_000_000
    assert safetensors_io.read_metadata(SHIPPED)["architecture"] == "small"
