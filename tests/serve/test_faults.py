"""Every write, sync, truncation, rename and removal fails once, or is the last that the process makes.

As SQLite's own tests do: nothing that was acknowledged is lost, and nothing is there by half.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "faults"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no gcc on Linux here")
MEMORY = Path("/dev/shm")  # where a sync costs nothing, as many thousands are made


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", built, HERE / "faults.c", "-ldl"], check=True)
    return built


@needs_gcc
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("work", "faults", "calls"),
    [("batches", 1, 200), ("rollout", 1, 200), ("files", 5, 9), ("backup", 2, 20), ("migration", 1, 50)],
)
def test_no_failing_call_loses_what_was_acknowledged(work, faults, calls, library, tmp_path):
    place = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as folder:
        command = [sys.executable, HERE / "work.py", folder, work, str(faults)]
        top = str(Path(__file__).parents[2])
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), top])
        environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": path}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == []
    assert found["calls"] >= calls
    assert found["tried"] == faults * found["calls"]
    assert found["acknowledged"] > 0
