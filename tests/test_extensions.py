import json
import os
import re
from pathlib import Path

import pytest

from safer_tta import extensions
from safer_tta.bench.results import Results
from safer_tta.errors import InvalidValueError, MissingPackageError
from safer_tta.methods import METHODS
from safer_tta.mixing import MIXINGS
from safer_tta.predictors import PREDICTORS
from tests.processes import CONTEXT, call, good, running, safer

HALF = '''
"""Half: Tent that steps half as far.

Anonymous, "Half steps", 2026.
"""

from safer_tta.methods import option, positive, register
from safer_tta.methods.tent import Tent


@register("half")
class Half(Tent):
    lr: float = option(5e-4, positive)
'''

GREY = '''
from safer_tta.attacks.registry import register


@register("grey", own_steps=True, passes=0)
def grey(surrogate, images, labels, threat, randomness):
    """Spend the budget on going towards grey."""
    images = images / 255
    return images + (0.5 - images).clamp(-threat["eps"], threat["eps"])
'''

PLAN = """
title = "Half steps"
[[grids]]
targets = "one"
rates = [100]
rows = [
  { label = "Half", method = "half", predictor = "plain", attack = { name = "grey" } },
  { label = "By hand", method = "tent", predictor = "plain", attack = { name = "grey" }, options = { lr = 5e-4 } },
]
"""


class Workshop:
    """A folder with two extensions and a plan that uses them."""

    def __init__(self, folder: Path) -> None:
        self.half, self.grey, self.plan = (folder / name for name in ("half.py", "grey.py", "plan.toml"))
        for path, content in ((self.half, HALF), (self.grey, GREY), (self.plan, PLAN)):
            path.write_text(content)
        self.extensions = ("--extension", self.half, "--extension", self.grey)
        self.quick = ("--quick", "--workers", 1, "--threads", 1, "--json", "--store")

    def bench(self, what, store):
        """Run `safer bench`; return its exit code and the failures by label."""
        ended = safer(*self.extensions, "bench", *what, *self.quick, store)
        return ended.returncode, json.loads(ended.stdout)["failed"]


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def test_commands_know_and_list_what_a_file_registers(workshop):
    dry = ("bench", workshop.plan, "--quick", "--dry-run")
    assert good(*workshop.extensions, *dry)["runs"] == 2
    unknown = safer("--extension", workshop.grey, *dry)
    assert unknown.returncode == 2
    assert re.search("'half' is unknown.*--extension FILE", unknown.stderr)
    listed = good("--extension", workshop.half, "methods")
    assert listed["half"]["what"] == "Half: Tent that steps half as far."
    assert listed.keys() - METHODS.keys() == {"half"}


def test_runs_are_made_again_only_if_their_extension_changes(workshop, tmp_path):
    store = tmp_path / "store"
    rows, known = Results(store / "runs"), set()

    def bench():
        """Return the accuracy of new rows by method, and all files that are made."""
        assert workshop.bench([workshop.plan], store) == (0, {})
        new = [row for row in rows.rows() if row["run"] not in known]
        known.update(row["run"] for row in new)
        return {row["method"]: row["accuracy"] for row in new}, {path.name for path in (store / "made").iterdir()}

    accuracy, made = bench()
    assert accuracy["half"] == accuracy["tent"], "the same method by another name, on the same stream"
    assert {row["attack"] for row in rows.rows()} == {"grey"}
    assert bench() == ({}, made), "nothing is made twice"
    workshop.half.write_text(HALF.replace("5e-4", "5e-2"))
    changed, still = bench()
    assert set(changed) == {"half"}, "runs that do not use the file stay"
    assert changed["half"] != accuracy["half"]
    assert still == made, "nothing is trained or attacked again for a method"
    workshop.grey.write_text(GREY.replace("0.5 - images", "0.4 - images"))
    _, more = bench()
    assert {name.partition("-")[0] for name in more - made} == {"attacked"}


def test_an_operator_of_an_extension_is_in_the_name_of_every_run(workshop, tmp_path):
    """Presets draw from all operators."""
    file, tasks, used = tmp_path / "gamma.py", tmp_path / "tasks.json", []
    code = "from safer_tta.views.operators import register\nregister('gamma')(lambda images, _: images**1.2)\n"
    file.write_text(code)
    workshop.plan.write_text(PLAN.replace('"half"', '"bn"').replace('"grey"', '"pgd"'))
    for extension in ([], ["--extension", file]):
        good(*extension, "bench", workshop.plan, "--quick", "--tasks", tasks)
        found = json.loads(tasks.read_text())["tasks"]
        used.append([len(what.get("extensions", [])) for kind, _, what, _, _ in found if kind == "run"])
    assert used == [[0, 0], [1, 1]]


def test_an_error_names_the_line_of_the_users_file(workshop, tmp_path):
    workshop.half.write_text(HALF + "\n    def forward(self, images, draw):\n        return images.nothing\n")
    code, failed = workshop.bench([workshop.plan], tmp_path / "store")
    assert code == 1
    (reason,) = failed.values()
    assert reason.startswith(f"half.py:{len(HALF.splitlines()) + 3}: AttributeError: ")


def test_tasks_are_refused_if_the_extension_is_another(workshop, tmp_path):
    tasks = tmp_path / "tasks.json"
    good(*workshop.extensions, "bench", workshop.plan, "--quick", "--seeds", 1, "--tasks", tasks)
    workshop.half.write_text(HALF + "\n# another\n")
    code, failed = workshop.bench(["tasks", tasks], tmp_path / "first")
    assert code == 1
    assert [("other extensions" in reason) for reason in failed.values()] == [True]
    workshop.half.write_text(HALF)
    workshop.grey.write_text(GREY + "\n# another\n")
    _, failed = workshop.bench(["tasks", tasks], tmp_path / "second")
    assert any("other extensions" in reason for reason in failed.values())
    assert not list((tmp_path / "second" / "made").glob("attacked-*")), "nothing is made under the old name"
    workshop.grey.write_text(GREY)
    assert workshop.bench(["tasks", tasks], tmp_path / "first") == (0, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a Python file"),
        ("1 / 0", "own.py:1: ZeroDivisionError"),
        ("import nothing_of_that_name", "own.py:1: ModuleNotFoundError"),
        (HALF.replace('"half"', '"tent"'), "method 'tent' exists already"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused(content, message, tmp_path):
    file = tmp_path / "own.py"
    if content is not None:
        file.write_text(content)
    ended = safer("--extension", file, "methods")
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert message in line
    assert "own.py" in line


def load_value(file, connection):
    from safer_tta import extensions

    extensions.load([file])
    from safer_tta_extensions.own import VALUE

    connection.send((VALUE, *(extension.content for extension in extensions._loaded.values())))


def test_what_runs_is_what_was_hashed(tmp_path):
    """A cache of compiled files would go by the time and the size of a file, and both may be as before."""
    file, loaded = tmp_path / "own.py", []
    receiver, sender = CONTEXT.Pipe(duplex=False)
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        with running(load_value, file, sender):
            loaded.append(receiver.recv())
    assert [value for value, _ in loaded] == [1, 2]
    assert loaded[0][1] != loaded[1][1]


@pytest.mark.parametrize(("registry", "name"), [(MIXINGS, "gate"), (PREDICTORS, "safer"), (METHODS, "tent")])
def test_names_that_are_taken_are_refused(registry, name):
    with pytest.raises(InvalidValueError, match=f"{registry.kind} '{name}' exists already; choose another name"):
        registry.register(name)(type("Mine", (METHODS["pl"],), {}))


def load_twice(half, twin):
    from safer_tta import extensions, methods

    run = {"row": {"method": "half"}, "other": [1, None]}
    assert extensions.code(run) == {}
    extensions.load([str(half)])
    extensions.load([str(half)])
    assert extensions.loaded_paths() == (str(half.resolve()),)
    (content,) = extensions.code(run)["extensions"]
    assert extensions.code({"method": "tent"}) == {}
    assert extensions.code_of(methods.METHODS["half"]) == {"extension": content}
    assert extensions.code_of(methods.METHODS["tent"]) == {}
    with pytest.raises(InvalidValueError, match="two extensions are called 'half'"):
        extensions.load([str(twin)])


def test_in_python_each_file_is_loaded_once(workshop, tmp_path):
    twin = tmp_path / "elsewhere" / "half.py"
    twin.parent.mkdir()
    twin.write_text(HALF)
    assert call(load_twice, workshop.half, twin) == 0


@pytest.mark.parametrize(("content", "error"), [("1 / 0", InvalidValueError), ("import no_such", MissingPackageError)])
def test_only_a_failed_import_is_a_missing_package(content, error, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(content)
    with pytest.raises(error, match=r"extension broken.py:1: ") as raised:
        extensions.load([file])
    assert type(raised.value) is error
