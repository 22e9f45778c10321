"""Scripts of benchmarks/ as modules."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import safer_tta

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a script by its name. None of them changes how this process allocates memory."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(safer_tta, "keep_freed_memory", lambda: True, raising=False)
    return importlib.import_module


@pytest.fixture
def run(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, str]]]:
    """Run a script with options, and return the rows that it has written to a file."""

    def measure(name: str, out: Path, *options: object) -> list[dict[str, str]]:
        module = script(name)
        monkeypatch.setattr("sys.argv", [f"{name}.py", "--out", str(out), *map(str, options)])
        module.main()
        return script("rows").read(out)

    return measure
