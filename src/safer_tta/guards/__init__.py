"""A guard watches a method while it adapts, and undoes what went wrong."""

from .alarm import Alarm, troubles
from .anchor import Anchor
from .guard import POLICIES, Guard
from .memory import COUNTERS, Memory
from .watch import KINDS, ActiveAlarm, Watch, flags

__all__ = [
    "COUNTERS", "KINDS", "POLICIES", "ActiveAlarm", "Alarm", "Anchor", "Guard", "Memory", "Watch", "flags", "troubles",
]  # fmt: skip
