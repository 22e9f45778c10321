"""Attacks in pixel space: transferred PGD, EOT through a defended predictor, AutoAttack."""

from .autoattack import autoattack
from .eot import eot_pgd
from .pgd import pgd

__all__ = ["autoattack", "eot_pgd", "pgd"]
