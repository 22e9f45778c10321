"""Attacks in pixel space. They are made on a surrogate ahead of a stream, or live through the deployed predictor."""

from .._internal.autoload import import_all
from .autoattack import autoattack
from .dia import dia
from .eot import eot_pgd
from .patch import patch
from .pgd import pgd
from .rays import rays
from .registry import ATTACKS
from .square import square
from .threat import full_threat

import_all(__name__, __path__)

__all__ = ["ATTACKS", "autoattack", "dia", "eot_pgd", "full_threat", "patch", "pgd", "rays", "square"]
