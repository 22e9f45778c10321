"""Streams, their states and their last answers in one SQLite file, which outlives the process."""

from .answers import KEPT
from .copies import Findings, backup, check, restore
from .journal import Answered, Journal
from .streams import Json, Stream

__all__ = ["KEPT", "Answered", "Findings", "Journal", "Json", "Stream", "backup", "check", "restore"]
