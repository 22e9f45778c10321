"""Attacks in pixel space: transferred PGD, EOT through a defended predictor, AutoAttack."""

from .pgd import pgd

__all__ = ["pgd"]
