"""A small network that is right about most of its images, and its audits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from safer_tta.auditing import Report, audit
from tests.conftest import batches, small_net
from tests.serve.conftest import browser

__all__ = ["browser"]
BATCH = 8
DECLARED = {"mean": 0, "std": 1}


def labelled(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of images with the classes that the network names them."""
    model = small_net().eval()
    with torch.no_grad():
        return [(images, model(images).argmax(dim=1)) for images in batches(count, size=BATCH)]


@pytest.fixture
def audited(tmp_path) -> Callable[..., Report]:
    """Audit the network in the test's folder, with what is cheap unless the test asks for more."""

    def run(*threats: str, **options: Any) -> Report:
        usual = {"method": "tent", "predictor": "plain", "batch": BATCH, "folder": tmp_path / "audit"}
        return audit(small_net(), labelled(), threats=threats, **{**usual, **DECLARED, **options})

    return run
