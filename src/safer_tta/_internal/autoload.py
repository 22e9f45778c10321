"""Import all files of a package, so that each registers what it defines."""

import importlib
import pkgutil


def import_all(package: str, path: list[str]) -> None:
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
