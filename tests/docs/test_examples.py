"""Run the examples as a reader does: scripts as processes, notebooks in a kernel, each in an empty folder."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

Check = Callable[[str], None]
CHECKS: dict[str, Check] = {}


def shows(check: Check) -> Check:
    CHECKS[check.__name__] = check
    return check


def numbers(text: str, before: str) -> list[list[float]]:
    """Return the numbers of every line that begins with these words, without those in the words."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(before)]
    return [[float(n) for n in re.findall(r"-?\d+\.\d+|-?\d+", line[len(before) :])] for line in lines]


@shows
def first_look(output: str) -> None:
    ((clean, perturbed),) = numbers(output, "Mean weight of the image itself:")
    assert perturbed < clean
    suspicion = [float(s) for s in re.findall(r"mean suspicion (\S+)", output)]
    assert max(suspicion[:2]) < min(suspicion[2:])


@shows
def wrap_own_model(output: str) -> None:
    undeclared, declared, adapted = (float(n) for n in re.findall(r"^ +(\d+\.\d)  ", output, re.MULTILINE))
    assert undeclared < declared < adapted
    assert "refused: images" in output
    weights = [float(w) for w in re.findall(r"weight (\d\.\d+)", output)]
    assert len(weights) == 5
    assert sum(weights) == pytest.approx(1, abs=0.01)
    assert "continued, both answer the same: True" in output
    assert "exported: OwnNet, scores (40, 7)" in output


@shows
def guard_a_stream(output: str) -> None:
    parts = re.split(r"^(?=a stuck|pure noise)", output, flags=re.MULTILINE)[1:]
    before = [numbers(part, "after clean batches")[0][0] for part in parts]
    after = [numbers(part, "after garbage")[0][0] for part in parts]
    warned, rolled_back, frozen, noise = after
    assert min(before) > 90
    assert warned < 50, "without a guard the garbage is learnt"
    assert min(rolled_back, frozen) > warned + 30
    assert re.search(r"collapses [1-9]\d*, rollbacks [1-9]", parts[1])
    assert parts[2].rstrip().endswith("frozen")
    assert noise < 90
    assert numbers(parts[3], "after guard.rollback()")[0][0] > noise + 5


@shows
def attack_your_model(output: str) -> None:
    assert "no pixel moved by more than 8 of 255 levels" in output
    ((clean, hit),) = numbers(output, "surrogate    wrong on")
    assert clean < 20
    assert hit > 95
    ((source_clean, source_hit),) = numbers(output, "source model wrong on")
    assert source_hit > source_clean + 30, "it transfers"
    (tent,), (safer, safer_g) = numbers(output, "Tent   "), numbers(output, "Tent + SAFER")
    assert tent[2] < tent[1] < tent[0]
    for row in (safer, safer_g):
        assert row[0] > tent[0] - 10
        assert row[1] > tent[1] + 20
        assert row[2] > tent[2] + 40


@shows
def own_method(output: str) -> None:
    assert output.startswith("balanced: Balanced entropy")
    (tent,), (balanced,) = numbers(output, "tent  "), numbers(output, "balanced  ")
    assert len(tent) == len(balanced) == 2  # one for each predictor
    assert min(balanced) > 50, "it learns no nonsense"
    assert balanced != tent, "it is a method of its own"
    assert "refused: balanced has no option momentun" in output
    (kept,), (start,) = numbers(output, "mean prediction of the stream:"), numbers(output, "after reset:")
    assert numbers(output, "after load:") == [kept]
    assert kept != start
    assert start == [round(1 / 7, 3)] * 7
    assert sum(kept) == pytest.approx(1, abs=0.01)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    CHECKS[script.stem](done.stdout)
    assert not list(tmp_path.iterdir()), "the script leaves files behind"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    elsewhere = tmp_path_factory.mktemp("jupyter")  # so that the kernel writes nothing to the home folder
    monkeypatch.setenv("IPYTHONDIR", str(elsewhere / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(elsewhere))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, kernel_name="python3", timeout=900, resources={"metadata": {"path": tmp_path}})
    client.execute()  # raises if a cell does
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    warnings = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in warnings if "safer_tta" in text]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    written = json.loads(path.read_text())
    assert (written["nbformat"], written["nbformat_minor"]) == (4, 5)
    nbformat.validate(written)
    code = [cell for cell in written["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    ids = [cell["id"] for cell in written["cells"]]
    assert len(set(ids)) == len(ids)


def test_there_are_notebooks_and_a_script_for_every_check() -> None:
    """Otherwise every test above would pass without a run."""
    assert set(CHECKS) == {path.stem for path in SCRIPTS}
    assert len(CHECKS) >= 5
    assert len(NOTEBOOKS) >= 2
