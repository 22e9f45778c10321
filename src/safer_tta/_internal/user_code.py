"""The user's own Python files. Each is run once in a process, and only where the user has named it."""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..errors import InvalidValueError, MissingPackageError

PACKAGE = "safer_tta_extensions"


@dataclass(frozen=True)
class UserFile:
    module: ModuleType
    content: bytes  # exactly what was run


_files: dict[Path, UserFile] = {}


def load(file: str | Path) -> UserFile:
    """Run a file, or return it if it has been run already."""
    path = Path(file).resolve()
    if path not in _files:
        if not path.is_file() or path.suffix != ".py":
            raise InvalidValueError(f"extension {str(file)!r} is not a Python file; expected a file of your own code")
        _files[path] = _run(path)
    return _files[path]


def find(stem: str) -> UserFile | None:
    """Return the file of this name, without its ending, if it has been run."""
    return next((file for path, file in _files.items() if path.stem == stem), None)


def _run(path: Path) -> UserFile:
    """Run exactly the content that is kept: a cache of compiled files may hold an older version."""
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
    return UserFile(module, content)


def explain(error: Exception, *files: Path) -> str:
    """Return an error as one line, with the place in the user's file where it arose."""
    own = {str(path) for path in (*files, *_files)}
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    where = f"{Path(places[-1].filename).name}:{places[-1].lineno}: " if places else ""
    return f"{where}{type(error).__name__}: {error}"
