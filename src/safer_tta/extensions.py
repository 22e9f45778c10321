"""Load a user's own Python files, which register methods, operators, rules, mixings or attacks for the commands.

The content of a file enters the names of the runs that use it, so an edited file gets no rows of its old version.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import methods, mixing, pooling, predictors
from ._internal import user_code
from .attacks import ATTACKS
from .data.store import digest
from .models.norm import NORMS
from .views.pipeline import PRESETS, drawable_operators

REGISTRIES = (methods.METHODS, predictors.PREDICTORS, mixing.MIXINGS, pooling.RULES, PRESETS, NORMS, ATTACKS)


@dataclass(frozen=True)
class Extension:
    content: str  # a hash of the file
    names: frozenset[str]  # what it registers
    everywhere: bool  # whether every run counts as one that uses it: it may add an operator that presets draw


_loaded: dict[Path, Extension] = {}


def load(files: Iterable[str | Path]) -> None:
    """Import files in this order, each of them once in a process."""
    for file in files:
        path = Path(file).resolve()
        if path in _loaded:
            continue
        before, operators = _names(), drawable_operators()
        known = user_code.find(path.stem) is not None  # then what it registers is not seen here
        content = digest({"content": user_code.load(file).content.hex()})
        everywhere = known or drawable_operators() != operators
        _loaded[path] = Extension(content, frozenset(_names() - before), everywhere)


def _names() -> set[str]:
    return {name for registry in REGISTRIES for name in registry}


def loaded_paths() -> tuple[str, ...]:
    """Return the paths of all loaded files, so that other processes can load them too."""
    return tuple(map(str, _loaded))


def code(definition: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hashes of the files that a run uses, for its name.

    A file is used if the definition of the run has a name that it registers. One that adds an operator is always used.
    """
    words = set(_words(definition))
    used = [e.content for e in _loaded.values() if e.everywhere or e.names & words]
    return {"extensions": used} if used else {}


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _words(inner)


def code_of(thing: Any) -> dict[str, str]:
    """Return the hash of the file that defines a function or class, if that file is an extension."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    known = {f"{user_code.PACKAGE}.{path.stem}": extension.content for path, extension in _loaded.items()}
    return {"extension": known[thing.__module__]} if thing.__module__ in known else {}


def code_of_attack(name: str, threat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hashes of the files that an attack's images depend on: its own, and those of a defence around it."""
    known = ATTACKS[name]
    return {**code_of(known.make), **(code(threat) if known.parts({**known.options, **threat}) else {})}
