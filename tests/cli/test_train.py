import os
import signal
import time

from safer_tta.training.trainer import recipe_of
from tests.data.parts import image_folder
from tests.processes import run_safer, running

SMALL = ("--architecture", "small", "--steps", 1, "--batch", 2)


def test_a_model_remembers_its_data_and_its_side(safer, good, tmp_path):
    data, model = image_folder(tmp_path / "pictures", count=6), tmp_path / "m.safetensors"
    good("train", "source", "--data", data, "--target", "one", "--side", 16, *SMALL, "--out", model)
    assert recipe_of(model)["side"] == 16
    row = good("run", "--data", data, "--target", "one", "--model", model, "--store", tmp_path / "s")
    assert row["images"] == 12
    other = safer("run", "--target", "sketch", "--model", model, "--store", tmp_path / "s")
    assert other.returncode == 2
    assert "knows the classes cat, dog and synthetic has" in other.stderr


def test_control_c_says_that_the_same_command_resumes(tmp_path):
    out, errors = tmp_path / "m.safetensors", tmp_path / "errors"
    command = ["train", "source", "--target", "sketch", "--out", str(out), "--steps", "9999", "--batch", "2"]
    with running(run_safer, command, tmp_path / "output", errors, tmp_path, {}) as process:
        while not out.with_name("m.safetensors.progress").exists():  # until it has something to resume from
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    assert "the same command resumes" in errors.read_text()
