"""SAFER-G, the gate: what strays, how suspicious that is, and how much an original counts then."""

from .gate import Gate

__all__ = ["Gate"]
