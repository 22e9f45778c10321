"""Run by `make package` in an environment that has the wheel, torch and numpy and nothing else."""

import importlib.util
import sys
import tempfile
from importlib import resources
from pathlib import Path

import torch

import safer_tta
from safer_tta import doctor
from safer_tta.bench.run import Run, Setting, perform
from safer_tta.data import ArrayStore, StreamSpec, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.training import THREAT, attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate

EXTRAS = ("typer", "rich", "pydantic", "PIL", "duckdb", "fastapi", "httpx", "timm", "ray", "matplotlib", "safetensors")
assert not [name for name in EXTRAS if importlib.util.find_spec(name)], "this environment is not clean"
assert "site-packages" in safer_tta.__file__, "imported from the source tree"
assert (resources.files("safer_tta") / "py.typed").is_file(), "no type information in the wheel"
assert not [finding for finding in doctor.examine() if finding.state == "bad"]

adapted = safer_tta.adapt(safer_tta.models.zoo.create("resnet18", num_classes=7), seed=0)
assert adapted(torch.rand(4, 3, 64, 64)).probs.shape == (4, 7)

with tempfile.TemporaryDirectory() as name:  # train, attack, run: none of it needs an extra
    folder, data = Path(name), open_dataset("synthetic", count=70)
    train_source(data, "sketch", source_recipe("synthetic", steps=2, batch=4), folder / "source.safetensors")
    domain, path = data.domain("sketch"), folder / "surrogate.safetensors"
    surrogate = train_surrogate(domain, surrogate_recipe("synthetic", steps=2, batch=4), path)
    threat = {**THREAT, "steps": 1}
    copies = attacked_copies(domain, surrogate, ArrayStore(folder / "a"), source=digest_file(path), threat=threat)
    setting = Setting((domain,), (copies,), threat, folder / "source.safetensors")
    row = perform(Run(predictor="safer-gate", stream=StreamSpec(attack_rate=50)), setting, folder / "runs")
assert 0 <= row["accuracy"] <= 100

sys.stdout.write(
    f"safer-tta {safer_tta.__version__} with torch {torch.__version__} alone: imported, adapted, attacked\n"
)
