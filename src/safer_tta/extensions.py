"""A user's own files, so that commands know what they register: methods, operators, rules, mixings, attacks.

What is made with them is named after their content too: an edited file never answers with the rows of the one before.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .data.store import digest_file

ROOM = "safer_tta_extensions"
_loaded: dict[Path, str] = {}  # the hash of each file's content


def load(files: Iterable[str | Path]) -> None:
    """Import these files, in this order, each once in a process."""
    for file in files:
        path = Path(file).resolve()
        if path not in _loaded:
            if not path.is_file() or path.suffix != ".py":
                raise ValueError(f"extension {str(file)!r} is no Python file; expected one that registers something")
            _import(path)
            _loaded[path] = digest_file(path)


def _import(path: Path) -> None:
    name = f"{ROOM}.{path.stem}"
    if name in sys.modules:
        raise ValueError(f"two extensions are called {path.stem!r}; rename one of them")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a file that ends in .py has one
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportError(f"extension {path}: {type(error).__name__}: {error}") from error


def loaded() -> tuple[str, ...]:
    """Their paths, for other processes to load them too."""
    return tuple(map(str, _loaded))


def code() -> dict[str, list[str]]:
    """What of them belongs into the name of a run: all of them, as an operator changes every draw; nothing without."""
    return {"extensions": list(_loaded.values())} if _loaded else {}


def code_of(thing: Any) -> dict[str, str]:
    """What belongs into the name of what this function or class makes: its file, if that is an extension."""
    known = {f"{ROOM}.{path.stem}": content for path, content in _loaded.items()}
    return {"extension": known[thing.__module__]} if thing.__module__ in known else {}
