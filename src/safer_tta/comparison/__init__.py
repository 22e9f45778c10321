"""Whether adapting helps on some images, with or without labels."""

from .run import compare
from .verdict import Candidate, Comparison

__all__ = ["Candidate", "Comparison", "compare"]
