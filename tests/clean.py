"""Use the wheel in an environment that has only torch and numpy (`make package`)."""

import importlib.util
import sys
import tempfile
from importlib import resources
from pathlib import Path

import torch

import safer_tta
from safer_tta import doctor
from safer_tta.attacks import full_threat
from safer_tta.bench.experiment import AttackOn, Experiment
from safer_tta.bench.run import Materials, perform
from safer_tta.data import ArrayStore, StreamSpec, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.training import attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate
from safer_tta.training.definitions import definition_of

EXTRAS = ("typer", "rich", "pydantic", "PIL", "duckdb", "fastapi", "httpx", "timm", "ray", "matplotlib", "safetensors")
assert not [name for name in EXTRAS if importlib.util.find_spec(name)], "this environment is not clean"
assert "site-packages" in safer_tta.__file__, "imported from the source tree"
assert (resources.files("safer_tta") / "py.typed").is_file(), "no type information in the wheel"
assert (resources.files("safer_tta.bench") / "page" / "page.css").is_file(), "no style for pages in the wheel"
assert not [finding for finding in doctor.examine() if finding.state == "bad"]

adapted = safer_tta.adapt(safer_tta.models.zoo.create("resnet18", num_classes=7), seed=0)
assert adapted(torch.rand(4, 3, 64, 64)).probs.shape == (4, 7)

with tempfile.TemporaryDirectory() as name:  # a model goes into a file and comes back
    model, path = safer_tta.models.zoo.create("small", num_classes=7).eval(), Path(name) / "model.safetensors"
    safer_tta.Classifier(model).save(path, architecture="small", arguments={"num_classes": 7}, side=32)
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(safer_tta.load_classifier(path)(images)[1], model(images))

with tempfile.TemporaryDirectory() as name:  # training, attacking and running need no extra
    folder, data = Path(name), open_dataset("synthetic", count=70)
    source, path, domain = folder / "source.safetensors", folder / "surrogate.safetensors", data.domain("sketch")
    train_source(data, "sketch", source_recipe("synthetic", steps=2, batch=4), source)
    surrogate = train_surrogate(domain, surrogate_recipe("synthetic", steps=2, batch=4), path)
    threat = full_threat(steps=1)
    copies = attacked_copies(domain, surrogate, ArrayStore(folder / "a"), source=digest_file(path), threat=threat)
    experiment = Experiment(
        data=data.identity,
        target="sketch",
        source=definition_of(source),
        stream=StreamSpec(attack_rate=50),
        attack=AttackOn(name="pgd", threat=threat, surrogates=(definition_of(path),)),
    )
    row = perform(experiment, Materials((domain,), source, (copies,)), folder / "runs")
assert 0 <= row["accuracy"] <= 100

sys.stdout.write(f"safer-tta {safer_tta.__version__} with only torch {torch.__version__}: adapted and attacked\n")
