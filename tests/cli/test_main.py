"""The command `safer`: its help, its lists, and how errors of users and bugs end it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
from typer.main import get_command

from safer_tta.cli import app
from safer_tta.methods import METHODS
from tests.conftest import PACS, needs_pacs
from tests.data.parts import image_folder

COMMANDS = ["attack", "bench", "data check", "demo", "doctor", "methods", "run", "send", "serve", "train"]


def test_every_command_is_listed(safer):
    listed = safer("--help").output
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert sorted(names) == sorted({command.partition(" ")[0] for command in COMMANDS})
    assert all(re.search(rf"│ {name}\s", listed) for name in names)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_option(command, safer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ended = safer(*command.split(), "--help")
    assert ended.code == 0
    assert f"safer {command}" in ended.output
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    for parameter in found.params:
        assert parameter.opts[0] in ended.output
        assert parameter.help.endswith((".", ")"))


@pytest.mark.parametrize("command", ["attack", "run"])
def test_help_shows_words_in_brackets(command, safer, monkeypatch):
    """rich would take [attacks] as a style and swallow it."""
    monkeypatch.setenv("COLUMNS", "200")
    assert "the extra [attacks]" in safer(command, "--help").output


def test_help_does_not_wait_for_torch():
    code = """
        import sys
        from safer_tta.cli import main
        sys.argv = ["safer", "run", "--help"]
        try:
            main()
        finally:
            sys.stderr.write(f"torch {'torch' in sys.modules}")
    """
    assert ended(code).stderr == "torch False"


def ended(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The end of a process that runs some Python."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("error", ["TypeError", "AssertionError"])
def test_a_bug_shows_a_traceback(error):
    code = f"""
        import sys
        from safer_tta import cli, demo
        def run_demo(*_, **__):
            raise {error}("what went wrong")
        demo.run_demo = run_demo
        sys.argv = ["safer", "demo"]
        cli.main()
    """
    bug = ended(code)
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr
    assert re.search(rf"{error}: what went wrong", bug.stderr)
    assert "run_demo" in bug.stderr


def test_debugging_shows_where_an_error_came_from(safer, monkeypatch):
    monkeypatch.setenv("SAFER_DEBUG", "1")
    with pytest.raises(ValueError, match="domain 'sktch' is unknown"):
        safer("demo", "--target", "sktch")


def test_methods_are_listed(good):
    rows = good("methods")
    assert rows.keys() == METHODS.keys()
    assert rows["tent"]["updates"] == "norm"
    assert all(row["what"] for row in rows.values())


@needs_pacs
def test_data_check_reports_what_is_missing(safer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "PACS"
    for place in sorted(PACS.glob("*/*")):
        target = root / place.relative_to(PACS)
        target.mkdir(parents=True)
        shutil.copy(min(place.iterdir()), target)
    found = safer("data", "check", root)
    assert found.code == 1
    assert "sketch: 7 images, officially 3929" in found.output
    assert json.loads((tmp_path / "pacs-manifest.json").read_text())["files"]


def test_data_check_of_a_sound_folder_ends_well(good, tmp_path):
    found = good("data", "check", image_folder(tmp_path / "pictures"), "--manifest", tmp_path / "files.json")
    assert found["counts"] == {domain: {"cat": 3, "dog": 3} for domain in ("one", "two")}
    assert len(json.loads((tmp_path / "files.json").read_text())["files"]) == 12
