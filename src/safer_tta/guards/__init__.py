"""A guard watches a method while it adapts, and undoes what went wrong."""

from .alarm import Alarm, troubles
from .anchor import Anchor
from .guard import COUNTERS, POLICIES, Guard, Memory

__all__ = ["COUNTERS", "POLICIES", "Alarm", "Anchor", "Guard", "Memory", "troubles"]
