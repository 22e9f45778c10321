"""Records what every method answers on every predictor, to compare with after a change of shape.

python -m tests.parity.recorded        writes recorded.safetensors beside this file

The file in the repository was written at the commit before the second edition of the house, with the answers of then.
`test_recorded.py` asks for the same answers. They are in double precision, because processors differ in the last bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import safer_tta
from safer_tta import methods, predictors
from safer_tta._internal import safetensors_io
from tests.conftest import LEARNING, batches, small_net

FILE = Path(__file__).with_name("recorded.safetensors")
# Without SAFER-G: since version 8 of the gate the images before complete batches as small as these.
PREDICTORS = ("plain", "jpeg", "fft", "blur", "safer", "safer-a")
OPTIONS = {**LEARNING, "memo": {"copies": 3}, "cotta": {"versions": 3, "threshold": 1.1}, "tesla": {}}


def answers(method: str, predictor: str) -> Tensor:
    """The probabilities of the last of five batches."""
    model = safer_tta.Classifier(small_net().double())
    adapted = methods.create(method, predictors.create(predictor, model, seed=5), **OPTIONS.get(method, {}))
    return [adapted(images.double()) for images in batches(5, size=8)][-1].probs


def record() -> None:
    torch.set_num_threads(1)
    tensors = {f"{m}/{p}": answers(m, p) for m in sorted(methods.METHODS) for p in PREDICTORS}
    safetensors_io.write(FILE, tensors, {})


if __name__ == "__main__":
    record()
