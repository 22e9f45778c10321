"""Run the snippets and commands of README and docs, page by page, top to bottom, in an empty folder.

`safer` commands are made small (SMALLER). `safer demo` only shows its help (tests/test_demo.py runs it), `make` is a
dry run, scripts must only exist, and nothing is installed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer

from safer_tta.cli import app
from safer_tta.serve import schemas
from tests.data.parts import image_folder
from tests.serve.helpers import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_CODE = {"", "toml", "text", "json", "{.python .no-run}", "{.bash .no-run}"}
MOST_NOT_RUN = 4  # blocks of all pages together, for packages that are not installed

# What pages take for granted. A command runs in this process, since torch is loaded here; the bench starts workers,
# which would import this program again, so it gets a process of its own.
PRELUDE = """
import atexit, shlex, subprocess, sys, time, urllib.request
import torch, safer_tta
torch.manual_seed(0)
model = safer_tta.models.zoo.create("small", num_classes=7)
images = torch.rand(8, 3, 64, 64)
labels = torch.randint(0, 7, (8,))
batches = [torch.rand(8, 3, 64, 64) for _ in range(3)]

def run(command, may_fail=False):
    print("$", command, flush=True)
    from safer_tta.cli import main
    sys.argv = shlex.split(command)
    try:
        main()
    except SystemExit as ended:
        assert not ended.code or may_fail, command

def start(command):
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
    (r"^safer attack (.*)--store work( --attack-steps 20)?", r"safer attack \1--store work --attack-steps 1"),
    (r"^safer audit (.*)", r"safer audit \1 --threat clean --threat dia --predictor plain"),
    (r"^safer run (.*)", r"safer run \1 --attack-steps 1 --images 64"),
    (r"^safer bench (?!list|status|tasks)(?!.*--quick)(?!.*--dry-run)(.*)", r"safer bench \1 --quick"),
]


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(kind.strip(), body) for kind, body in FENCE.findall(page.read_text())]


def commands(body: str) -> list[str]:
    """Return the commands of a block: one a line, unless a backslash continues it, and without comments."""
    lines = re.sub(r"\s*\\\n\s*", " ", body).splitlines()
    return [line for line in (f" {line}".partition(" #")[0].strip() for line in lines) if line]


COMMANDS = {c for page in PAGES for kind, body in blocks(page) if kind == "bash" for c in commands(body)}
# Also those within sentences and tables, of result pages too.
COMMANDS |= {c for page in (ROOT / "docs").rglob("*.md") for c in re.findall(r"`(safer [^`\n]+)`", page.read_text())}


def script(page: Path, port: int) -> str:
    lines = [PRELUDE]
    for kind, body in blocks(page):
        if kind == "python":
            lines.append(body)
        elif kind == "bash":
            lines += [line for command in commands(body) for line in as_python(command, port)]
        else:
            assert kind in NOT_CODE, f"a block of {kind!r}: expected python, bash or {sorted(NOT_CODE)}"
    return "\n".join(lines).replace("8017", str(port))


def as_python(command: str, port: int) -> list[str]:
    first = command.split()[0]
    if first == "pip":
        return [f"# {command}"]  # test_extras_that_pages_name_exist checks what is installed
    if first == "make":
        return [f"start({f'make --dry-run --silent -C {ROOT} {command.split()[1]}'!r})"]
    if first == "python":
        file = command.split()[1]
        assert (ROOT / file).exists() or file == "-m", f"{command}: there is no {file}"
        return [] if file != "-m" else [f"start({command.replace('python', sys.executable, 1)!r})"]
    assert first == "safer", f"{command!r}: expected a command of safer, make, pip or python"
    for pattern, instead in SMALLER:
        command = re.sub(pattern, instead, command)
    kind = command.split()[1]
    own_process = command.replace("safer", f"{sys.executable} -m safer_tta.cli", 1)
    if kind == "serve" and command.split()[2].startswith("-"):
        return [f"serve({f'{own_process} --port {port}'!r}, {port})"]
    if kind == "bench":
        return [f"start({own_process!r})"]
    more = {"demo": " --help", "send": f" --url http://127.0.0.1:{port}"}.get(kind, "")
    return [f"run({command + more!r}, may_fail={kind == 'doctor'})"]  # it fails if it finds a problem with this machine


@pytest.fixture
def folder(tmp_path, source_file, monkeypatch):
    if not os.environ.get("SAFER_CACHE"):
        monkeypatch.setenv("SAFER_CACHE", str(source_file.parent / "cache"))
    image_folder(tmp_path / "PATH" / "TO" / "PACS")
    return image_folder(tmp_path, ["FOLDER"], ["."])


@pytest.mark.parametrize(
    "page", [page for page in PAGES if {"python", "bash"} & dict(blocks(page)).keys()], ids=lambda page: page.stem
)
def test_a_page_does_what_it_says(page, folder, source_file, monkeypatch):
    if "safer train source" not in script(page, 0):
        shutil.copy(source_file, folder / "source.safetensors")
    program = folder / "page.py"
    program.write_text(script(page, free_port()))
    if re.search("import timm|transformers", program.read_text()):  # they import torchvision
        (folder / "sitecustomize.py").write_text("import tests.schemas")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run([sys.executable, str(program)], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{page.name}:\n{ran.stdout[-2000:]}\n{textwrap.shorten(ran.stderr[-4000:], 4000)}"


def test_pages_have_code_and_almost_all_python_is_run():
    """Otherwise the fences are not found, and nothing above could fail."""
    found = [kind for page in PAGES for kind, _ in blocks(page)]
    assert found.count("{.python .no-run}") <= MOST_NOT_RUN
    assert found.count("python") >= 20
    assert found.count("bash") >= 8


def test_extras_that_pages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"safer-tta\[([\w,]+)\]", page.read_text())}
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


@pytest.mark.parametrize("command", sorted(command for command in COMMANDS if command.startswith("safer ")))
def test_commands_and_their_options_exist(command):
    """Include those that the runs above leave out or make smaller."""
    words = shlex.split(command)[1:]
    parsed = typer.main.get_command(app)
    if words[0] == "--extension":
        assert words.pop(0) in {option for parameter in parsed.params for option in parameter.opts}
        words.pop(0)
    while words and hasattr(parsed, "commands") and not words[0].startswith("-"):
        parsed = parsed.commands[words.pop(0)]
    known = {option for parameter in parsed.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_json_of_the_service_is_as_its_schemas():
    """The examples on the page are complete: a field that is missing or unknown is refused."""
    examples = [json.loads(body) for kind, body in blocks(ROOT / "docs" / "serve.md") if kind == "json"]
    *answers, message = examples  # the last one is what a webhook is sent
    for schema, example in zip((schemas.Stream, schemas.Answer, schemas.Model, schemas.Rollout), answers, strict=True):
        schema.model_validate(example, strict=True)
    schemas.Alarm.model_validate(message["alarm"], strict=True)
