"""Generators that are named by their purpose: a name gives the same numbers in any process and in any order."""

import torch
from torch import Generator

from .hashing import hash_bytes


def generator(*parts: object) -> Generator:
    """Return a CPU generator seeded by (seed, purpose, index ...), so that resumed work needs no generator on disk."""
    digest = hash_bytes([repr(parts).encode()], size=8)
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_seed(randomness: Generator | None = None) -> int:
    """Draw a seed for another generator from this one, or from torch's own."""
    return int(torch.randint(2**62, (), generator=randomness))
