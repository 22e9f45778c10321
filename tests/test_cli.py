"""The command as a user runs it: a real process, its output and its exit code."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PACS, needs_pacs

SAFER = [sys.executable, "-m", "safer_tta.cli"]


def safer(*arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None):
    command = [*SAFER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


def good(*arguments: object, **options: object):
    result = safer(*arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "command", [(), ("train",), ("train", "source"), ("attack",), ("run",), ("demo",), ("data", "check")]
)
def test_help(command):
    result = safer(*command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_methods_are_listed():
    rows = good("methods")
    assert rows["tent"]["updates"] == "norm"
    assert all(row["what"] for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("attack", "--target", "sketch", "--surrogate", "nowhere", "--store", "."), "nowhere"),
        (("train", "source", "--target", "clipart", "--out", "x"), "domain 'clipart' is unknown"),
        (("train", "source", "--target", "sketch", "--out", "x", "--data", "/nowhere"), "not a folder"),
        (("run", "--target", "sketch", "--model", "nowhere", "--store", "."), "nowhere"),
        (("run", "--target", "sketch", "--model", "x", "--store", ".", "--attack-rate", "50"), "--surrogate"),
        (("run", "--target", "sketch", "--model", "x", "--store", ".", "--attack-rate", "150"), "0 to 100"),
        (("train", "robust", "--target", "sketch", "--out", "x", "--eps", "8"), "8/255"),
        (("train", "robust", "--target", "sketch", "--out", "x", "--eps", "much"), "fraction"),
        (("data", "check", "/nowhere"), "not a folder"),
        (("train", "source", "--target", "sketch", "--out", "x", "--eps", "8/255"), "train robust"),
        (("bench", "main", "epsilon"), "one plan at a time"),
        (("bench", "tasks", "file", "--dry-run"), "has no --dry-run"),
        (("bench", "main", "--address", "ray://x"), "--engine ray"),
        (("serve", "--model", "x", "--method", "nomethod"), "'nomethod' is unknown"),
        (("run", "--target", "sketch", "--model", "x", "--store", ".", "--attack", "grey"), "pgd"),
        (
            ("run", "--target", "sketch", "--model", "x", "--store", ".", "--attack", "autoattack", "--steps", "3"),
            "itself",
        ),
        (("bench", "main", "--quick", "--steps", "7"), "sizes of its own"),
        (("train", "source", "--target", "sketch", "--out", "x", "--side", "0"), "--side"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments, says, tmp_path):
    result = safer(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert says in complaint(result.stderr)
    assert not list(tmp_path.glob("*.safetensors"))


def complaint(stderr: str) -> str:
    """The one line that says what is wrong. Of a wrong option typer says in two more how the command is used."""
    *usage, said = [line for line in stderr.splitlines() if line]
    assert said.lower().startswith("error: ")
    assert [line.split()[0] for line in usage] in ([], ["Usage:", "Try"])
    return said


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "source", "--target", "sketch", "--out", "x", "--device", "nonsense"),
        ("train", "source", "--target", "sketch", "--out", "x", "--steps", "0"),
        ("run", "--target", "sketch", "--model", "x", "--store", ".", "--method", "nomethod"),
        ("run", "--target", "sketch", "--model", "x", "--store", ".", "--norm", "l2", "--attack-rate", "50"),
        ("run", "--target", "sketch"),
    ],
)
def test_other_mistakes_are_one_line_too(arguments, tmp_path):
    result = safer(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert complaint(result.stderr)


def listen_to_interrupts() -> None:
    """A test run in the background of a shell inherits deafness to Ctrl-C; a user's terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_says_how_to_go_on(tmp_path):
    out = tmp_path / "m.safetensors"
    command = [*SAFER, "train", "source", "--target", "sketch", "--out", str(out), "--steps", "9999"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts) as process:
        while not (tmp_path / "m.safetensors.progress").exists():  # until it is well on its way
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from here" in said


@needs_pacs
def test_pacs_excerpt_from_training_to_a_row(tmp_path):
    """4 domains x 7 classes x 20 images of PACS: train source and surrogate, attack, run."""
    root = tmp_path / "PACS"
    for place in sorted(PACS.glob("*/*")):
        target = root / place.relative_to(PACS)
        target.mkdir(parents=True)
        for image in sorted(place.iterdir())[:20]:
            shutil.copy(image, target)
    import os

    env = {**os.environ, "SAFER_CACHE": str(tmp_path / "cache")}
    common = ("--data", root, "--target", "art_painting", "--side", "48")
    quick = ("--architecture", "small", "--steps", "30", "--batch", "16", "--lr", "1e-3")
    source, surrogate, store = tmp_path / "source.safetensors", tmp_path / "surrogate.safetensors", tmp_path / "store"
    model = good("train", "source", *common, *quick, "--out", source, env=env)
    assert model["validation_accuracy"] > 100 / 7
    good("train", "surrogate", *common, *quick, "--steps", "60", "--out", surrogate, env=env)
    good(
        "train",
        "robust",
        *common,
        *quick,
        "--steps",
        "2",
        "--attack-steps",
        "2",
        "--out",
        tmp_path / "robust.safetensors",
        env=env,
    )
    threat = ("--surrogate", surrogate, "--store", store)
    attacked = good("attack", *common, *threat, env=env)
    assert attacked["images"] == 140
    assert attacked["surrogate_attacked"] < attacked["surrogate_clean"] / 2
    row = good("run", *common, *threat, "--model", source, "--attack-rate", "50", env=env)
    assert (row["dataset"], row["target"], row["images"]) == ("pacs", "art_painting", 140)
    again = good("run", *common, *threat, "--model", source, "--attack-rate", "50", env=env)
    assert again == row
    shown = safer("run", *common, *threat, "--model", source, "--attack-rate", "50", env=env)
    assert row["run"] in shown.stdout


@needs_pacs
def test_data_check_says_what_is_wrong(tmp_path):
    root = tmp_path / "PACS"
    for place in sorted(PACS.glob("*/*")):
        target = root / place.relative_to(PACS)
        target.mkdir(parents=True)
        shutil.copy(sorted(place.iterdir())[0], target)
    result = safer("data", "check", root, cwd=tmp_path)
    assert result.returncode == 1
    assert "sketch: 7 images, officially 3929" in result.stdout
    assert json.loads((tmp_path / "pacs-manifest.json").read_text())["files"]


def _pictures(root: Path, domains: int = 2, classes: int = 2, images: int = 6) -> Path:
    from PIL import Image

    for domain in range(domains):
        for kind in range(classes):
            folder = root / f"domain{domain}" / f"class{kind}"
            folder.mkdir(parents=True)
            for number in range(images):
                Image.new("RGB", (20, 20), (40 * domain, 120 * kind, 30 * number)).save(folder / f"{number}.png")
    return root


def test_a_folder_too_deep_is_no_dataset(tmp_path):
    result = safer("data", "check", _pictures(tmp_path / "pics") / "domain0", cwd=tmp_path)
    assert result.returncode == 2
    assert "expected domain0/domain/class/image" in result.stderr


@pytest.mark.parametrize("options", [(), ("--weights", "none"), ("--weights", "none", "--architecture", "resnet18")])
def test_a_quick_look_at_ones_own_folder_needs_no_weights(options, tmp_path):
    data = _pictures(tmp_path / "pics")
    command = ("bench", "attack-rate", "--quick", "--data", data, "--side", 16, *options)
    assert good(*command, "--dry-run", cwd=tmp_path)["runs"] > 0


def test_a_model_goes_with_its_own_data_and_side(tmp_path):
    data, model = _pictures(tmp_path / "pics"), tmp_path / "m.safetensors"
    small = ("--architecture", "small", "--steps", 1, "--batch", 2)
    good("train", "source", "--data", data, "--target", "domain0", "--side", 16, *small, "--out", model, cwd=tmp_path)
    row = good("run", "--data", data, "--target", "domain0", "--model", model, "--store", "s", cwd=tmp_path)
    assert row["images"] == 12
    assert '"side": 16' in safer_recipe(model)
    result = safer("run", "--target", "sketch", "--model", model, "--store", "s", cwd=tmp_path)
    assert result.returncode == 2
    assert "knows the classes class0, class1 and synthetic has" in result.stderr


def safer_recipe(model: Path) -> str:
    from safer_tta.training.trainer import recipe_of

    return json.dumps(recipe_of(model))
