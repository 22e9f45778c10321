"""An audit: how much a model with its defence withstands, threat by threat."""

from .audit import audit
from .report import Report
from .threats import LADDER, Threat

__all__ = ["LADDER", "Report", "Threat", "audit"]
