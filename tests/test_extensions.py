"""A user's own files behind --extension: real commands, real worker processes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from safer_tta.bench.results import Results
from tests.test_cli import good, safer

HALF = '''
"""Half: Tent that steps half as far.

Nobody, "Half steps", 2026.
"""

from safer_tta.methods import register
from safer_tta.methods.tent import Tent


@register("half")
class Half(Tent):
    def __init__(self, predictor, *, lr=5e-4):
        super().__init__(predictor, lr=lr)
'''

GREY = '''
from safer_tta.attacks.registry import register


@register("grey", own_steps=True, passes=0)
def grey(surrogate, images, labels, threat, randomness):
    """The budget spent on going towards grey."""
    images = images / 255
    return images + (0.5 - images).clamp(-threat["eps"], threat["eps"])
'''

PLAN = """
title = "Half steps"
[[grids]]
targets = "one"
rates = [100]
[[grids.rows]]
label = "Half"
method = "half"
predictor = "plain"
attack = { name = "grey" }
[[grids.rows]]
label = "Half by hand"
method = "tent"
predictor = "plain"
options = { lr = 5e-4 }
attack = { name = "grey" }
"""


@pytest.fixture
def half(tmp_path) -> Path:
    file = tmp_path / "half.py"
    file.write_text(HALF)
    return file


@pytest.fixture
def grey(tmp_path) -> Path:
    file = tmp_path / "grey.py"
    file.write_text(GREY)
    return file


def test_commands_know_what_a_file_registers(half):
    assert good("--extension", half, "methods")["half"]["what"] == "Half: Tent that steps half as far."
    assert "half" not in good("methods")


def test_a_plan_runs_with_own_methods_and_attacks_and_again_when_they_change(half, grey, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    command = ["--extension", half, "--extension", grey, "bench", plan, "--quick", "--seeds", "1", "--workers", "2"]
    store = tmp_path / "store"

    def bench() -> tuple[dict[str, float], set[str], set[str]]:
        result = safer(*command, "--threads", "1", "--store", store)
        assert result.returncode == 0, result.stderr
        rows = [row for row in Results(store / "runs").rows() if row["run"] not in before]
        made = {path.name for path in (store / "made").iterdir()}
        return {row["method"]: row["accuracy"] for row in rows}, {row["run"] for row in rows}, made

    before: set[str] = set()
    accuracy, runs, made = bench()
    assert accuracy["half"] == accuracy["tent"], "the same method by another name, on the same stream"
    assert {row["attack"] for row in Results(store / "runs").rows()} == {"grey"}
    before = runs
    assert bench()[1] == set(), "asked again, nothing is made anew"

    half.write_text(HALF.replace("lr=5e-4", "lr=5e-2"))
    changed, other, still = bench()
    assert len(other) == 2
    assert changed["half"] != changed["tent"]
    assert still == made, "nothing is trained or attacked again for a method"

    before |= other
    grey.write_text(GREY.replace("0.5 - images", "0.4 - images"))
    _, _, more = bench()
    assert {name.partition("-")[0] for name in more - made} == {"attacked"}


def test_tasks_are_refused_where_the_extension_is_another(half, grey, tmp_path):
    plan, tasks = tmp_path / "plan.toml", tmp_path / "tasks.json"
    plan.write_text(PLAN)
    both = ("--extension", half, "--extension", grey)
    good(*both, "bench", plan, "--quick", "--seeds", 1, "--tasks", tasks)
    travelled = ["bench", "tasks", tasks, "--quick", "--store", tmp_path / "store", "--workers", 1, "--threads", 1]
    half.write_text(HALF + "\n# another\n")
    result = safer(*both, *travelled, "--json")
    assert result.returncode == 1
    assert all("other extensions" in why for label, why in json.loads(result.stdout)["failed"].items())
    half.write_text(HALF)
    assert good(*both, *travelled)["failed"] == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no Python file"),
        ("1 / 0", "ZeroDivisionError"),
        (HALF.replace('"half"', '"tent"'), "two methods are called 'tent'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(content, says, tmp_path):
    file = tmp_path / "own.py"
    if content is not None:
        file.write_text(content)
    result = safer("--extension", file, "methods")
    assert result.returncode == 2
    assert says in result.stderr
    assert "own.py" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_in_python_each_file_is_loaded_once_and_names_what_is_made(half, tmp_path):
    twin = tmp_path / "elsewhere" / "half.py"
    twin.parent.mkdir()
    twin.write_text(HALF)
    code = f"""
        from safer_tta import extensions, methods
        assert extensions.code() == {{}}
        extensions.load([{str(half)!r}])
        extensions.load([{str(half)!r}])
        assert extensions.loaded() == ({str(half.resolve())!r},)
        (content,) = extensions.code()["extensions"]
        assert extensions.code_of(methods.METHODS["half"]) == {{"extension": content}}
        assert extensions.code_of(methods.METHODS["tent"]) == {{}}
        try:
            extensions.load([{str(twin)!r}])
        except ValueError as error:
            assert "two extensions are called 'half'" in str(error)
        else:
            raise AssertionError
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
