"""Generators named by what they are for: the same words, the same numbers, in any process and in any order."""

from __future__ import annotations

import hashlib

import torch
from torch import Generator


def generator(*parts: object) -> Generator:
    """A CPU generator seeded by (seed, purpose, index ...). Work that is resumed needs no generator state on disk."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def drawn(randomness: Generator | None = None) -> int:
    """A seed for another generator, drawn from this one, or from torch's own."""
    return int(torch.randint(2**62, (), generator=randomness))
