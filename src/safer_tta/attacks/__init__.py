"""Attacks in pixel space. They are made on a surrogate ahead of a stream, or live through the deployed predictor."""

from .._internal.autoload import import_all
from .attacker import Attacker, start
from .autoattack import autoattack
from .dia import dia
from .eot import eot_pgd
from .gmsa import gmsa
from .pgd import pgd
from .registry import ATTACKS
from .tepa import tepa
from .threat import full_threat

import_all(__name__, __path__)

__all__ = ["ATTACKS", "Attacker", "autoattack", "dia", "eot_pgd", "full_threat", "gmsa", "pgd", "start", "tepa"]
