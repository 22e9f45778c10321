"""A guard watches a method while it adapts, and undoes what went wrong."""

from .anchor import Anchor
from .guard import COUNTERS, POLICIES, Guard, Memory

__all__ = ["COUNTERS", "POLICIES", "Anchor", "Guard", "Memory"]
