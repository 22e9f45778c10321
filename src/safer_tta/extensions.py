"""A user's own files, so that commands know what they register: methods, operators, rules, mixings, attacks.

What is made with them is named after their content too: an edited file never answers with the rows of the one before.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from . import methods, mixing, pooling, predictors
from .attacks import ATTACKS
from .data.store import digest
from .errors import InvalidValueError, MissingPackageError
from .views.pipeline import PRESETS, drawable_operators

ROOM = "safer_tta_extensions"
REGISTRIES = (methods.METHODS, predictors.PREDICTORS, mixing.MIXINGS, pooling.RULES, PRESETS, ATTACKS)


@dataclass(frozen=True)
class Extension:
    content: str  # a hash of it
    names: frozenset[str]  # of what it registers
    everywhere: bool  # whether it has an operator that presets draw, which changes every draw of views


_loaded: dict[Path, Extension] = {}


def load(files: Iterable[str | Path]) -> None:
    """Import these files, in this order, each once in a process."""
    for file in files:
        path = Path(file).resolve()
        if path not in _loaded:
            if not path.is_file() or path.suffix != ".py":
                raise InvalidValueError(
                    f"extension {str(file)!r} is no Python file; expected one that registers something"
                )
            before, operators = _names(), drawable_operators()
            content = _import(path)
            _loaded[path] = Extension(content, frozenset(_names() - before), drawable_operators() != operators)


def _names() -> set[str]:
    return {name for registry in REGISTRIES for name in registry}


def _import(path: Path) -> str:
    """The hash of what was run: read once, and never taken from a cache of compiled files, which goes by time."""
    name, content = f"{ROOM}.{path.stem}", path.read_bytes()
    if name in sys.modules:
        raise InvalidValueError(f"two extensions are called {path.stem!r}; rename one of them")
    sys.modules.setdefault(ROOM, ModuleType(ROOM))
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(content, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise MissingPackageError(f"extension {told(error, path)}") from error
    return digest({"content": content.hex()})


def loaded() -> tuple[str, ...]:
    """Their paths, for other processes to load them too."""
    return tuple(map(str, _loaded))


def code(definition: Mapping[str, Any]) -> dict[str, list[str]]:
    """What of them belongs into the name of a run, going by the words that define it: the files that registered one of
    them, and those with an operator in any case."""
    words = set(_words(definition))
    used = [e.content for e in _loaded.values() if e.everywhere or e.names & words]
    return {"extensions": used} if used else {}


def _words(value: Any) -> Iterator[str]:
    """Every word in a definition; "tent+medbn" is two."""
    if isinstance(value, str):
        yield from value.split("+")
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _words(inner)


def code_of(thing: Any) -> dict[str, str]:
    """What belongs into the name of what this function or class makes: its file, if that is an extension."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    known = {f"{ROOM}.{path.stem}": extension.content for path, extension in _loaded.items()}
    return {"extension": known[thing.__module__]} if thing.__module__ in known else {}


def told(error: Exception, *files: Path) -> str:
    """An error in a line, with the place in a user's file where it arose."""
    own = {str(path) for path in (*files, *_loaded)}
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    where = f"{Path(places[-1].filename).name}:{places[-1].lineno}: " if places else ""
    return f"{where}{type(error).__name__}: {error}"
