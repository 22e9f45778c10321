import errno
import json
import os
import re
import textwrap

import pytest
from typer.main import get_command

import safer_tta
from safer_tta.cli import app
from safer_tta.methods import METHODS
from tests.conftest import needs_pacs
from tests.data.parts import image_folder, pacs_excerpt
from tests.processes import python

COMMANDS = [
    "attack",
    "attacks",
    "audit",
    "bench",
    "data check",
    "demo",
    "doctor",
    "methods",
    "pack",
    "run",
    "send",
    "serve",
    "train",
]
COMMANDS += ["serve backup", "serve check", "serve restore"]


def test_every_command_is_listed(safer):
    listed = safer("--help").stdout
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert sorted(names) == sorted({command.partition(" ")[0] for command in COMMANDS})
    assert all(re.search(rf"│ {name}\s", listed) for name in names)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_option(command, safer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    ended = safer(*command.split(), "--help")
    assert ended.returncode == 0
    assert f"safer {command}" in ended.stdout
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    for parameter in found.params:
        assert parameter.opts[0] in ended.stdout
        assert parameter.help.endswith((".", ")"))
    if command in ("attack", "run"):
        assert "the extra [attacks]" in ended.stdout, "rich would take it as a style and swallow it"


def test_the_version_is_that_of_the_package(safer):
    ended = safer("--version")
    assert (ended.returncode, ended.stdout) == (0, f"safer-tta {safer_tta.__version__}\n")


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
    assert python("-c", textwrap.dedent(code)).stderr == "torch False"


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
    bug = python("-c", textwrap.dedent(code))
    assert bug.returncode == 1
    assert re.search(rf"Traceback[^$]*in run_demo[^$]*{error}: what went wrong", bug.stderr)


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
    found = safer("data", "check", pacs_excerpt(tmp_path / "PACS", 1))
    assert found.returncode == 1
    assert "sketch: 7 images, officially 3929" in found.stdout
    assert json.loads((tmp_path / "pacs-manifest.json").read_text())["files"]


def test_data_check_of_a_sound_folder_ends_well(good, tmp_path):
    found = good("data", "check", image_folder(tmp_path / "pictures"), "--manifest", tmp_path / "files.json")
    assert found["counts"] == {domain: {"cat": 3, "dog": 3} for domain in ("one", "two")}
    assert len(json.loads((tmp_path / "files.json").read_text())["files"]) == 12


def test_data_check_gives_a_line_for_each_problem(safer, tmp_path):
    root = image_folder(tmp_path / "pictures")
    (root / "one" / "cat" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "one" / "dog" / "text.png").write_text("not an image")
    for file in (root / "two" / "cat").iterdir():
        file.unlink()
    found = safer("data", "check", root, "--manifest", tmp_path / "files.json")
    assert found.returncode == 1
    problems = [line for line in found.stdout.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3
    assert all(any(word in line for line in problems) for word in ("gone.png", "text.png", "no image in class 'cat'"))


def test_a_full_disk_names_the_file_that_has_no_room(safer, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    ended = safer("data", "check", image_folder(tmp_path / "pictures"), "--manifest", tmp_path / "files.json")
    assert ended.returncode == 2
    assert ended.stderr == f"error: {tmp_path / 'files.json'}: No space left on device\n"
