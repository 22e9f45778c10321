"""What the contract tests share: devices, batches that must be refused, generators.

A newly registered thing is covered by being registered. What is named in these tests is left out where it cannot apply,
is the paper's own list, or needs options to learn from batches as few and as small as these.
"""

import torch

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")

BAD_BATCHES = {
    "grey": torch.rand(2, 1, 24, 24),
    "four channels": torch.rand(2, 4, 24, 24),
    "one image without batch": torch.rand(3, 24, 24),
    "empty": torch.rand(0, 3, 24, 24),
    "int64": torch.zeros(2, 3, 24, 24, dtype=torch.int64),
    "nan": torch.full((2, 3, 24, 24), torch.nan),
    "inf": torch.full((2, 3, 24, 24), torch.inf),
    "above one": torch.full((2, 3, 24, 24), 1.5),
    "normalised": torch.full((2, 3, 24, 24), -1.0),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
