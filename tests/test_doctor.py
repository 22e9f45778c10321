import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from safer_tta import doctor
from tests.processes import python, safer

MARKS = {"good": " ", "note": "!", "bad": "✗"}


def test_every_check_ends_in_a_finding():
    findings = list(doctor.examine())
    assert len(findings) == len(doctor.CHECKS) == len({finding.what for finding in findings})
    for finding in findings:
        assert finding.state in MARKS
        assert finding.found
        assert (finding.state == "bad") <= bool(finding.advice)


@pytest.mark.parametrize("broken", [False, True])
def test_the_commands_agree_and_fail_if_something_is_bad(tmp_path, broken):
    package(tmp_path, "torchvision", "import nothing_of_that_name" if broken else "")
    environment = {"PYTHONPATH": python_path(tmp_path), "SAFER_CACHE": str(tmp_path / "cache")}
    runs = [safer("doctor", **environment), python("-m", "safer_tta.doctor", **environment)]
    listed = safer("doctor", "--json", **environment)
    assert {run.returncode for run in (listed, *runs)} == {int(broken)}
    found = json.loads(listed.stdout)
    states = Counter(finding["state"] for finding in found.values())
    assert states["bad"] == int(broken)
    assert (found["torchvision"]["state"] == "bad") == broken
    assert found["a step of adaptation"]["state"] == "good"
    for run in runs:
        printed = {line[2:24].strip(): line[0] for line in run.stdout.splitlines() if line[2:3].strip()}
        assert printed == {what: MARKS[finding["state"]] for what, finding in found.items()}


def package(folder, name, body):
    """Write a package of version 0.28.0."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)
    metadata = folder / f"{name}-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.28.0\n")


def python_path(folder):
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(
    ("body", "state", "advice"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "bad", "both for CPUs, or both for CUDA"),
        ("import nothing_of_that_name", "bad", "Reinstall it together with torch"),
        ("", "good", ""),
    ],
)
def test_a_torchvision_that_does_not_fit_is_reported(tmp_path, monkeypatch, body, state, advice):
    package(tmp_path, "torchvision", body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    finding = doctor._torchvision()
    assert finding.state == state
    assert advice in finding.advice
    assert "0.28.0" in finding.found


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFER_CACHE", str(tmp_path / "cache"))
    assert doctor._cache().state in {"good", "note"}
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)  # root may write everywhere
    assert doctor._cache().state == "bad"


def test_missing_extras_are_reported(monkeypatch):
    real = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "timm" else real(name))
    finding = doctor._extras()
    assert finding.state == "note"
    assert "models (no timm)" in finding.found
    assert "safer-tta[models]" in finding.advice


def test_extras_are_those_of_the_package():
    """By the names under which their packages are imported."""
    packaged = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    imported = {
        "pillow": "PIL", "prometheus-client": "prometheus_client", "python-multipart": "multipart",
        "fastapi-swagger": "fastapi_swagger", "opentelemetry-api": "opentelemetry",
    }  # fmt: skip
    for extra, names in doctor.EXTRAS.items():
        wanted = [re.match(r"[\w-]+", line)[0] for line in packaged["optional-dependencies"][extra]]
        assert sorted(names) == sorted(imported.get(name, name) for name in wanted if name != "safer-tta")
    assert doctor.EXTRAS.keys() == packaged["optional-dependencies"].keys() - {"dev"}
