"""Rooms whose files register themselves: a method, an attack is known by its file being there."""

from __future__ import annotations

import importlib
import pkgutil


def import_all(package: str, path: list[str]) -> None:
    """Import every file of a room, so that its decorators run."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
