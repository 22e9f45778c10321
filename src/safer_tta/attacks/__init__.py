"""Attacks in pixel space: transferred PGD, EOT through a defended predictor, AutoAttack."""

from ..rooms import import_all
from .autoattack import autoattack
from .eot import eot_pgd
from .pgd import pgd
from .registry import ATTACKS

import_all(__name__, __path__)

__all__ = ["ATTACKS", "autoattack", "eot_pgd", "pgd"]
