"""Snippets and commands of README and docs are carried out, page by page, top to bottom, in an empty folder.

Not to the letter: `safer` commands are made small (SMALLER), of `safer demo` only the help is asked (tests/test_demo.py
runs it), of `make` a dry run, of scripts whether they exist, and nothing is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from safer_tta.data import open_dataset
from safer_tta.training import source_recipe, train_source
from tests.serving import free_port

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_CODE = {"", "toml", "text", "json", "{.python .no-run}"}
FEW_NO_RUN = 4  # of all pages together: code for packages that are not here

# What a page takes for granted. Commands are made small, and trainings on a dataset that is not here use the embedded.
PRELUDE = """
import atexit, shlex, subprocess, sys, time, urllib.request
import torch, safer_tta
torch.manual_seed(0)
model = safer_tta.models.zoo.create("small", num_classes=7)
images = torch.rand(8, 3, 64, 64)
labels = torch.randint(0, 7, (8,))
batches = [torch.rand(8, 3, 64, 64) for _ in range(3)]

def run(command):
    print("$", command, flush=True)
    subprocess.run(shlex.split(command), check=True)

def serve(command, port):
    server = subprocess.Popen(shlex.split(command))
    atexit.register(server.kill)
    for _ in range(240):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz")
        except OSError:
            assert server.poll() is None, "the server has stopped"
            time.sleep(0.25)
    raise AssertionError("the server does not answer")
"""
SMALLER = [
    (r"--architecture resnet50 --weights WEIGHTS.safetensors", ""),
    (r"--weights WEIGHTS.safetensors --architecture resnet50 --device cuda", ""),
    (r"--data PATH/TO/PACS", "--data synthetic"),
    (r"^safer train (.*)", r"safer train \1 --steps 2 --batch 4"),
    (r"^safer attack (.*)--store work( --steps 20)?", r"safer attack \1--store work --steps 1"),
    (r"^safer run (.*)", r"safer run \1 --steps 1 --limit 64"),
    (r"^safer bench (?!list|status|tasks)(?!.*--quick)(?!.*--dry-run)(.*)", r"safer bench \1 --quick"),
]


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(kind.strip(), body) for kind, body in FENCE.findall(page.read_text())]


def commands(body: str) -> list[str]:
    return [line for line in (line.partition(" #")[0].strip() for line in body.splitlines()) if line]


def script(page: Path, port: int) -> str:
    """The page as one program."""
    lines = [PRELUDE]
    for kind, body in blocks(page):
        if kind == "python":
            lines.append(body)
        elif kind == "bash":
            lines += [line for command in commands(body) for line in carried_out(command, port)]
        else:
            assert kind in NOT_CODE, f"a block of {kind!r}: expected python, bash or {sorted(NOT_CODE)}"
    return "\n".join(lines).replace("8017", str(port))


def carried_out(command: str, port: int) -> list[str]:
    first = command.split()[0]
    if first == "pip":
        return [f"# {command}"]  # what is installed is tested by test_extras_that_pages_name_exist
    if first == "make":
        return [f"run({f'make --dry-run --silent -C {ROOT} {command.split()[1]}'!r})"]
    if first == "python":
        script = command.split()[1]
        assert (ROOT / script).exists() or script == "-m", f"{command}: there is no {script}"
        return [] if script != "-m" else [f"run({command.replace('python', sys.executable, 1)!r})"]
    assert first == "safer", f"{command!r}: expected a command of safer, make, pip or python"
    for pattern, instead in SMALLER:
        command = re.sub(pattern, instead, command)
    whole = command.replace("safer", f"{sys.executable} -m safer_tta.cli", 1)
    if command.startswith("safer serve"):
        return [f"serve({f'{whole} --port {port}'!r}, {port})"]
    if command.startswith("safer doctor"):
        return [f"subprocess.run(shlex.split({whole!r}))"]  # it fails where something is bad, as it should
    if command.startswith(("safer demo", "safer send")):
        whole += {"demo": " --help", "send": f" --url http://127.0.0.1:{port}"}[command.split()[1]]
    return [f"run({whole!r})"]


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A model to serve, for pages that begin with one."""
    path = tmp_path_factory.mktemp("source") / "source.safetensors"
    train_source(open_dataset("synthetic"), "sketch", source_recipe("synthetic", steps=2, batch=4), path)
    return path


@pytest.fixture
def folder(tmp_path, source, monkeypatch):
    from PIL import Image

    if not os.environ.get("SAFER_CACHE"):
        monkeypatch.setenv("SAFER_CACHE", str(source.parent / "cache"))
    shutil.copy(source, tmp_path)
    for place in ("FOLDER", *(f"PATH/TO/PACS/{domain}/{kind}" for domain in "ab" for kind in ("dog", "cat"))):
        (tmp_path / place).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 64), (80 * number, 40, 90)).save(tmp_path / place / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page, folder):
    program = folder / "page.py"
    program.write_text(script(page, free_port()))
    ran = subprocess.run([sys.executable, str(program)], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{page.name}:\n{ran.stdout[-2000:]}\n{textwrap.shorten(ran.stderr[-4000:], 4000)}"


def test_little_is_not_run():
    assert sum(kind == "{.python .no-run}" for page in PAGES for kind, _ in blocks(page)) <= FEW_NO_RUN


def test_pages_have_code_to_run():
    """Or else the fences are not found, and nothing above could fail."""
    found = [kind for page in PAGES for kind, _ in blocks(page)]
    assert found.count("python") >= 20
    assert found.count("bash") >= 8


def test_extras_that_pages_name_exist():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"safer-tta\[([\w,]+)\]", page.read_text())}
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


@pytest.mark.parametrize(
    "command", sorted({c for p in PAGES for k, b in blocks(p) if k == "bash" for c in commands(b)})
)
def test_options_of_commands_exist(command):
    """Also those that the pages' own runs leave out or make smaller."""
    words = shlex.split(command)
    if words[0] != "safer":
        pytest.skip("not a command of ours")
    path = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
    path = path[:1] if path[0] not in ("data",) else path[:2]
    shown = subprocess.run(
        [sys.executable, "-m", "safer_tta.cli", *path, "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    for option in (word for word in words if word.startswith("--")):
        assert option in shown, f"{option} is no option of safer {' '.join(path)}"
