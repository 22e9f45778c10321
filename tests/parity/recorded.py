"""Records what every method answers on every predictor, to compare with after a change of shape.

python -m tests.parity.recorded        writes recorded.safetensors beside this file

The file in the repository was written at the commit before the second edition of the house, with the answers of then.
`test_recorded.py` asks for the same answers, to the last bit where the machine computes as that one did.
"""

from __future__ import annotations

import hashlib
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
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIONS = {**LEARNING, "memo": {"copies": 3}, "cotta": {"versions": 3, "threshold": 1.1}, "tesla": {}}


def answers(method: str, predictor: str, dtype: str) -> tuple[Tensor, str]:
    """The probabilities of the last of five batches, and a hash of all that was answered and learnt."""
    model = safer_tta.Classifier(small_net().to(DTYPES[dtype]))
    adapted = methods.create(method, predictors.create(predictor, model, seed=5), **OPTIONS.get(method, {}))
    digest = hashlib.blake2b(digest_size=16)
    for images in batches(5, size=8):
        prediction = adapted(images.to(DTYPES[dtype]))
        report = prediction.report
        shown = (prediction.probs, prediction.logits, prediction.features, report.weights, report.reliability)
        signal = next(iter(report.signals.values()), None) if report.suspicion is None else report.suspicion
        for tensor in (*shown, report.dropped, signal):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().tobytes())
    state = adapted.state_dict()
    for name in sorted(state):
        digest.update(state[name].contiguous().cpu().numpy().tobytes())
    return prediction.probs, digest.hexdigest()


def record() -> None:
    torch.set_num_threads(1)
    tensors, hashes = {}, {}
    for method in sorted(methods.METHODS):
        for predictor in PREDICTORS:
            for dtype in DTYPES:
                name = f"{method}/{predictor}/{dtype}"
                probs, hashes[name] = answers(method, predictor, dtype)
                tensors[name] = probs
                print(name, hashes[name], flush=True)  # noqa: T201
    hashes["machine"] = machine()
    safetensors_io.write(FILE, tensors, hashes)


def machine() -> str:
    """What decides the last bits of a sum on a CPU."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread"


if __name__ == "__main__":
    record()
