"""Import all files of a package, so that each registers what it defines."""

from __future__ import annotations

import importlib
import pkgutil


def import_all(package: str, path: list[str]) -> None:
    """Import every public module of a package, so that its decorators run."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
