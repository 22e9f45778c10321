import subprocess
import sys
from pathlib import Path

import torch

from safer_tta._internal import safetensors_io
from safer_tta.training import SHIPPED

SCRIPT = Path(__file__).parents[2] / "tools" / "pretrain_backbone.py"


def test_the_script_writes_a_network_like_the_one_that_ships(tmp_path):
    out = tmp_path / "backbone.safetensors"
    subprocess.run([sys.executable, SCRIPT, "--out", out, "--images", "180", "--steps", "1"], check=True, cwd=tmp_path)
    (made, header), (shipped, _) = safetensors_io.read(out), safetensors_io.read(SHIPPED)
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {n: (t.shape, t.dtype) for n, t in shipped.items()}
    assert header["architecture"] == "small"
    assert all(torch.isfinite(tensor).all() for tensor in made.values())
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
