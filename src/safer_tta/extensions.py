"""Load a user's own Python files, which register methods, operators, rules, mixings or attacks for the commands.

The content of a file enters the names of the runs that use it, so an edited file gets no rows of its old version.
"""

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
from .models.norm import NORMS
from .views.pipeline import PRESETS, drawable_operators

PACKAGE = "safer_tta_extensions"
REGISTRIES = (methods.METHODS, predictors.PREDICTORS, mixing.MIXINGS, pooling.RULES, PRESETS, NORMS, ATTACKS)


@dataclass(frozen=True)
class Extension:
    content: str  # a hash of the file
    names: frozenset[str]  # what it registers
    everywhere: bool  # whether it adds an operator that presets draw, which changes every draw of views


_loaded: dict[Path, Extension] = {}


def load(files: Iterable[str | Path]) -> None:
    """Import files in this order, each of them once in a process."""
    for file in files:
        path = Path(file).resolve()
        if path in _loaded:
            continue
        if not path.is_file() or path.suffix != ".py":
            raise InvalidValueError(
                f"extension {str(file)!r} is not a Python file; expected one that registers something"
            )
        before, operators = _names(), drawable_operators()
        content = _import(path)
        _loaded[path] = Extension(content, frozenset(_names() - before), drawable_operators() != operators)


def _names() -> set[str]:
    return {name for registry in REGISTRIES for name in registry}


def _import(path: Path) -> str:
    """Run a file and return the hash of exactly what was run: a cache of compiled files may hold an older version."""
    name, content = f"{PACKAGE}.{path.stem}", path.read_bytes()
    if name in sys.modules:
        raise InvalidValueError(f"two extensions are called {path.stem!r}; rename one of them")
    sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(content, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        refused = MissingPackageError if isinstance(error, ImportError) else InvalidValueError
        raise refused(f"extension {explain(error, path)}") from error
    return digest({"content": content.hex()})


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
    known = {f"{PACKAGE}.{path.stem}": extension.content for path, extension in _loaded.items()}
    return {"extension": known[thing.__module__]} if thing.__module__ in known else {}


def explain(error: Exception, *files: Path) -> str:
    """Return an error as one line, with the place in the user's file where it arose."""
    own = {str(path) for path in (*files, *_loaded)}
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    where = f"{Path(places[-1].filename).name}:{places[-1].lineno}: " if places else ""
    return f"{where}{type(error).__name__}: {error}"
