"""Attacks in pixel space. They are made on a surrogate ahead of a stream, or live through the deployed predictor."""

from .._internal.autoload import import_all
from .apgd_eot import apgd_eot
from .attacker import Attacker, start
from .autoattack import autoattack
from .aware import aware
from .dia import dia
from .eot import eot_pgd
from .eot_margin import eot_margin
from .gmsa import gmsa
from .patch import patch
from .pgd import pgd
from .rays import rays
from .registry import ATTACKS, describe
from .resubmission import resubmit
from .square import square
from .tepa import tepa
from .threat import full_threat
from .transfer import transfer

import_all(__name__, __path__)

__all__ = [
    "ATTACKS",
    "Attacker",
    "apgd_eot",
    "autoattack",
    "aware",
    "describe",
    "dia",
    "eot_margin",
    "eot_pgd",
    "full_threat",
    "gmsa",
    "patch",
    "pgd",
    "rays",
    "resubmit",
    "square",
    "start",
    "tepa",
    "transfer",
]
