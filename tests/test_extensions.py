"""A user's own files behind --extension: real commands, real worker processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import safer_tta
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
    assert set(changed) == {"half"}, "what does not use the file stands"
    assert changed["half"] != accuracy["half"]
    assert still == made, "nothing is trained or attacked again for a method"

    before |= other
    grey.write_text(GREY.replace("0.5 - images", "0.4 - images"))
    _, _, more = bench()
    assert {name.partition("-")[0] for name in more - made} == {"attacked"}


def test_an_operator_of_ones_own_is_in_the_name_of_every_run(tmp_path):
    """Presets draw from all operators."""
    file, plan = tmp_path / "gamma.py", tmp_path / "plan.toml"
    file.write_text(
        "from safer_tta.views import operator\n@operator()\ndef gamma(images, _):\n    return images**1.2\n"
    )
    plan.write_text(PLAN.replace('"half"', '"bn"').replace('"grey"', '"pgd"'))
    names = []
    for extension in ([], ["--extension", file]):
        good(*extension, "bench", plan, "--quick", "--tasks", tmp_path / "tasks.json")
        tasks = json.loads((tmp_path / "tasks.json").read_text())["tasks"]
        names.append([what.get("extensions", []) for kind, _, what, _, _ in tasks if kind == "run"])
    assert names[0] == [[], []]
    assert [len(used) for used in names[1]] == [1, 1]


def test_where_a_users_code_fails_is_said(half, grey, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    half.write_text(HALF + "\n    def forward(self, images, draw):\n        return images.nothing\n")
    command = ["--extension", half, "--extension", grey, "bench", plan, "--quick", "--workers", 1, "--threads", 1]
    result = safer(*command, "--store", tmp_path / "store", "--json")
    assert result.returncode == 1
    (why,) = json.loads(result.stdout)["failed"].values()
    assert why.startswith("half.py:17: AttributeError: ")


def test_tasks_are_refused_where_the_extension_is_another(half, grey, tmp_path):
    plan, tasks = tmp_path / "plan.toml", tmp_path / "tasks.json"
    plan.write_text(PLAN)
    both = ("--extension", half, "--extension", grey)
    good(*both, "bench", plan, "--quick", "--seeds", 1, "--tasks", tasks)
    travelled = ["bench", "tasks", tasks, "--quick", "--workers", 1, "--threads", 1, "--store"]
    half.write_text(HALF + "\n# another\n")
    result = safer(*both, *travelled, tmp_path / "first", "--json")
    assert result.returncode == 1
    assert all("other extensions" in why for label, why in json.loads(result.stdout)["failed"].items())
    half.write_text(HALF)
    grey.write_text(GREY + "\n# another\n")
    result = safer(*both, *travelled, tmp_path / "second", "--json")
    assert any("other extensions" in why for why in json.loads(result.stdout)["failed"].values())
    assert not list((tmp_path / "second" / "made").glob("attacked-*")), "nothing is made under the old name"
    grey.write_text(GREY)
    assert good(*both, *travelled, tmp_path / "first")["failed"] == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no Python file"),
        ("1 / 0", "ZeroDivisionError"),
        (HALF.replace('"half"', '"tent"'), "another method is called 'tent' already"),
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


def test_what_runs_is_what_was_hashed(tmp_path):
    """A cache of compiled files goes by the time and the size of a file, and both may be as before."""
    file = tmp_path / "own.py"
    code = "import sys; from safer_tta import extensions; extensions.load([sys.argv[1]]); "
    code += (
        "from safer_tta_extensions.own import VALUE; print(VALUE, *(e.content for e in extensions._loaded.values()))"
    )
    said = []
    for value in ("1", "2"):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        result = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
        said.append(result.stdout.split())
    assert [value for value, _ in said] == ["1", "2"]
    assert said[0][1] != said[1][1]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("images / 255 + 0.5", "outside|changed an image by"),
        ("(images / 255 + 9 / 255).clamp(0, 1)", "changed an image by 0.0353 .linf.; allowed is 0.0314"),
        ("images[..., ::2] / 255", "made images of shape"),
    ],
)
def test_an_attack_that_does_what_its_threat_forbids_is_refused(returned, says, tmp_path, monkeypatch):
    from safer_tta.attacks import ATTACKS
    from safer_tta.attacks.registry import Attack
    from safer_tta.data import ArrayStore, open_dataset
    from safer_tta.training import attacked_copies

    made = eval(f"lambda surrogate, images, labels, threat, randomness: {returned}")
    monkeypatch.setitem(ATTACKS, "own", Attack(made, own_steps=True, passes=0))
    domain = open_dataset("synthetic", count=8).domain("sketch")
    network = safer_tta.Classifier(safer_tta.models.zoo.create("small"))
    with pytest.raises(ValueError, match=says):
        attacked_copies(domain, network, ArrayStore(tmp_path), source="s", attack="own")


def test_shipped_things_are_not_replaced():
    from safer_tta.mixing import MIXINGS
    from safer_tta.predictors import PREDICTORS

    for registry, name in ((MIXINGS, "gate"), (PREDICTORS, "safer")):
        with pytest.raises(ValueError, match=f"another {registry.kind} is called '{name}' already"):
            registry[name] = object


def test_in_python_each_file_is_loaded_once_and_names_what_is_made(half, tmp_path):
    twin = tmp_path / "elsewhere" / "half.py"
    twin.parent.mkdir()
    twin.write_text(HALF)
    code = f"""
        from safer_tta import extensions, methods
        named = {{"row": {{"method": "half+medbn"}}, "other": [1, None]}}
        assert extensions.code(named) == {{}}
        extensions.load([{str(half)!r}])
        extensions.load([{str(half)!r}])
        assert extensions.loaded_paths() == ({str(half.resolve())!r},)
        (content,) = extensions.code(named)["extensions"]
        assert extensions.code({{"method": "tent"}}) == {{}}
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
