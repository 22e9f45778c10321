"""The command in this process, and the small plan and its rows as the studies' tests have them."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess as Ended
from typing import Any

import pytest

from safer_tta.cli import main
from tests.bench.conftest import small, store, undisturbed
from tests.serve.conftest import asking, server

__all__ = ["asking", "good", "safer", "server", "small", "store", "undisturbed"]


@pytest.fixture
def safer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ended]:
    """Run the command without the start of a process, with a cache of the test's own."""
    monkeypatch.setenv("SAFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("safer_tta.cli.keep_freed_memory", lambda: True)  # it would last longer than the test
    monkeypatch.setattr("safer_tta.serve.logs.set_up", lambda *_: None)  # and so would this

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["safer", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(arguments, int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def good(safer: Callable[..., Ended]) -> Callable[..., Any]:
    """Run a command with --json and return its result."""

    def run(*arguments: object) -> Any:
        ended = safer(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run
