"""The command in this process, and the small plan and its rows as the studies' tests have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from safer_tta.cli import main
from tests.bench.conftest import small, store, undisturbed
from tests.serve.conftest import asking, server

__all__ = ["Ended", "asking", "good", "safer", "server", "small", "store", "undisturbed"]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    errors: str


@pytest.fixture
def safer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command without the start of a process."""
    monkeypatch.setattr("safer_tta.cli.keep_freed_memory", lambda: True)  # it would last longer than the test

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["safer", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def good(safer: Callable[..., Ended]) -> Callable[..., Any]:
    """Run a command with --json and return its result."""

    def run(*arguments: object) -> Any:
        ended = safer(*arguments, "--json")
        assert ended.code == 0, ended.errors
        return json.loads(ended.output)

    return run
