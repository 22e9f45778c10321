"""`safer doctor`: what it says of this machine, and of machines with known traps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from safer_tta import doctor

STATES = {"good", "note", "bad"}


def test_every_look_ends_in_a_finding_with_words():
    findings = list(doctor.examine())
    assert len(findings) == len(doctor.CHECKS) == len({finding.what for finding in findings})
    for finding in findings:
        assert finding.state in STATES
        assert finding.found
        assert (finding.state == "bad") <= bool(finding.advice)


@pytest.mark.parametrize("broken", [False, True])
def test_the_commands_say_the_same_and_fail_when_something_is_bad(tmp_path, broken):
    """On a machine where all is well but perhaps torchvision."""
    package(tmp_path, "torchvision", "import nothing_of_that_name" if broken else "")
    shown, listed, plain = (
        ran(tmp_path, *command)
        for command in (("safer_tta.cli", "doctor"), ("safer_tta.cli", "doctor", "--json"), ("safer_tta.doctor",))
    )
    assert {run.returncode for run in (shown, listed, plain)} == {int(broken)}
    found = json.loads(listed.stdout)
    assert {what for what, finding in found.items() if finding["state"] == "bad"} == (
        {"torchvision"} if broken else set()
    )
    assert found["a step of adaptation"]["state"] == "good"
    for run in (shown, plain):
        told = {line[2:24].strip(): line[0] for line in run.stdout.splitlines() if line[2:3].strip()}
        assert told == {what: {"good": " ", "note": "!", "bad": "✗"}[f["state"]] for what, f in found.items()}


def ran(folder, *command):
    """A process whose packages in the folder come before all others."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "SAFER_CACHE": str(folder / "cache")}
    run = [sys.executable, *(command if command[0] == "-c" else ("-m", *command))]
    return subprocess.run(run, capture_output=True, text=True, check=False, env=environment)


def package(folder, name, body):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)
    metadata = folder / f"{name}-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n")


@pytest.mark.parametrize(
    ("body", "state", "words"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "bad", "both for CPUs, or both for CUDA"),
        ("import nothing_of_that_name", "bad", "Install it anew"),
        ("", "good", ""),
    ],
)
def test_a_torchvision_that_does_not_fit_is_told(tmp_path, body, state, words):
    """A process whose torchvision is ours: broken in the way that is met, in another way, and not at all."""
    package(tmp_path, "torchvision", body)
    program = (
        "import dataclasses, json; from safer_tta import doctor; "
        "print(json.dumps(dataclasses.asdict(doctor._torchvision())))"
    )
    found = json.loads(ran(tmp_path, "-c", program).stdout)
    assert found["state"] == state
    assert words in found["advice"]
    assert "0.28.0" in found["found"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFER_CACHE", str(tmp_path / "cache"))
    assert doctor._cache().state in {"good", "note"}
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)  # root may write everywhere
    assert doctor._cache().state == "bad"


def test_missing_extras_are_named(monkeypatch):
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "timm" else real(name))
    finding = doctor._extras()
    assert finding.state == "note"
    assert "models (no timm)" in finding.found
    assert "safer-tta[models]" in finding.advice


def test_extras_are_those_that_are_packaged():
    """By the names under which their packages are imported."""
    packaged = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    imported = {"pillow": "PIL", "prometheus-client": "prometheus_client", "python-multipart": "multipart"}
    for extra, names in doctor.EXTRAS.items():
        wanted = [re.match(r"[\w-]+", line)[0] for line in packaged["optional-dependencies"][extra]]
        assert sorted(names) == sorted(imported.get(name, name) for name in wanted if name != "safer-tta")
    assert doctor.EXTRAS.keys() == packaged["optional-dependencies"].keys() - {"dev"}
