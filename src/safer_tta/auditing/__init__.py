"""An audit: how much a model with its defence withstands, threat by threat."""

from .report import Report
from .run import audit
from .threats import LADDER, Threat

__all__ = ["LADDER", "Report", "Threat", "audit"]
