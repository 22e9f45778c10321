"""Training and runs: killed and resumed to the same bytes, foreign checkpoints refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from safer_tta import Classifier
from safer_tta._internal import safetensors_io as tensorfile
from safer_tta.bench.run import Run, Setting, calibration_error, perform, rolling
from safer_tta.data import ArrayStore, StoreError, StreamSpec, excerpt, open_dataset
from safer_tta.training import (
    THREAT,
    Recipe,
    attacked_copies,
    full_threat,
    load,
    robust,
    source_recipe,
    surrogate_recipe,
    train,
    train_source,
    train_surrogate,
    trainer,
)
from safer_tta.training.augment import augment
from safer_tta.training.backbone import SHIPPED
from safer_tta.training.trainer import accuracy, recipe_of, split
from tests.conftest import WEIGHTS, needs_cuda, needs_weights

COUNT = 70


@pytest.fixture(scope="module")
def data():
    return open_dataset("synthetic", count=COUNT)


@pytest.fixture(scope="module")
def recipe():
    return source_recipe("synthetic", steps=24, batch=8, every=4)


@pytest.fixture(scope="module")
def trained(data, recipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "source.safetensors"
    train_source(data, "sketch", recipe, path)
    return path


def test_defaults_are_the_papers():
    recipe = source_recipe("pacs", weights="imagenet.safetensors")
    assert (recipe.architecture, recipe.steps, recipe.batch, recipe.lr) == ("resnet18", 5000, 32, 5e-5)
    assert robust(recipe).attack == {"eps": 8 / 255, "step": 2 / 255, "steps": 20}
    assert THREAT == {"eps": 8 / 255, "step": 2 / 255, "steps": 20, "norm": "linf"}
    assert surrogate_recipe("pacs", weights="imagenet.safetensors").seed != recipe.seed
    with pytest.raises(ValueError, match="weights"):
        source_recipe("pacs")


@pytest.mark.parametrize("change", [{"steps": 0}, {"batch": -1}, {"every": 0}, {"lr": 0.0}])
def test_recipes_are_checked(change):
    with pytest.raises(ValueError, match="expected"):
        Recipe(**change)


@needs_weights
def test_the_imagenet_network_trains_and_loads_again(data, tmp_path):
    """Its stride stands on the first 1x1 convolution; what is written must say so, or it could not be read."""
    recipe = Recipe(architecture="resnet50", weights=str(WEIGHTS), steps=1, batch=2, every=1)
    few = [
        dataclasses.replace(
            data.domain("photo"), images=data.domain("photo").images[:14], labels=data.domain("photo").labels[:14]
        )
    ]
    trained = train(few, recipe, tmp_path / "m.safetensors")
    again = load(tmp_path / "m.safetensors")
    assert again.model.layer2[0].conv1.stride == (2, 2)
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(trained.eval()(x)[1], again(x)[1])
    assert torch.equal(trained.mean, again.mean)


def test_a_model_of_another_training_is_not_handed_out(data, trained, recipe):
    for other in (dataclasses.replace(recipe, seed=5), dataclasses.replace(recipe, architecture="resnet18")):
        with pytest.raises(ValueError, match="another training"):
            train_source(data, "sketch", other, trained)
    with pytest.raises(ValueError, match="domains differ"):
        train_source(data, "photo", recipe, trained)


def test_where_the_weights_lie_does_not_matter(data, recipe, tmp_path):
    from safer_tta.data.store import digest_file

    names = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        weights = shutil.copy(SHIPPED, tmp_path / place / "w.safetensors")
        path = tmp_path / f"{place}.safetensors"
        train_source(data, "sketch", dataclasses.replace(recipe, steps=1, weights=str(weights)), path)
        names.append(digest_file(path))
    assert names[0] == names[1]


def test_rows_that_are_not_the_runs_own_are_refused(data, trained, tmp_path):
    sketch = data.domain("sketch")
    setting = Setting((sketch,), None, THREAT, trained)
    run = Run(method="none", predictor="plain")
    perform(run, setting, tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    for bad in ('{"accuracy": 99.9}', good[:-20], good.replace('"none"', '"tent"')):
        path.write_text(bad)
        with pytest.raises(StoreError, match=path.name):
            perform(run, setting, tmp_path)


def test_a_clean_run_does_not_depend_on_the_threat(data, trained, tmp_path):
    setting = Setting((data.domain("sketch"),), None, THREAT, trained)
    run = Run(method="none", predictor="plain")
    one = perform(run, setting, tmp_path)
    two = perform(run, dataclasses.replace(setting, threat={**THREAT, "eps": 16 / 255}), tmp_path)
    assert one == two
    assert one["eps"] is None
    assert one["reliability"] is None


def test_l2_needs_its_own_budget():
    assert full_threat(norm="l2", eps=1.0)["step"] == pytest.approx(2.5 / 20)
    with pytest.raises(ValueError, match="no default"):
        full_threat(norm="l2")


def test_the_backbone_is_shipped_and_small():
    assert SHIPPED.stat().st_size < 1_000_000
    assert tensorfile.read_metadata(SHIPPED)["architecture"] == "small"


def test_split_is_stratified():
    labels = np.repeat([0, 1, 2], [50, 10, 5])
    training, validation = split(labels, seed=0)
    assert np.bincount(labels[training]).tolist() == [40, 8, 4]
    assert sorted([*training, *validation]) == list(range(65))
    assert not np.array_equal(training, split(labels, seed=1)[0]), "every seed validates on other images"


def test_training_learns_and_keeps_the_best(data, trained):
    model = load(trained)
    described = recipe_of(trained)
    assert described["accuracy"] > 2 / 7, "24 steps from the backbone are better than chance"
    others = [data.domain(name) for name in data.domains if name != "sketch"]
    right = sum(
        accuracy(model, d.images[v], d.labels[v]) / 100 * len(v) for d in others for v in (split(d.labels, 0)[1],)
    )
    total = sum(len(split(d.labels, 0)[1]) for d in others)
    assert right / total == pytest.approx(described["accuracy"])
    assert set(described["domains"]) == {"photo", "painting", "cartoon"}


def test_of_a_wild_training_the_best_look_is_kept(data, recipe, tmp_path):
    """With steps so large that it gets worse again: what is best so far never falls, and is what is written."""
    looks = []
    wild = dataclasses.replace(recipe, lr=0.3, steps=60, batch=2, every=10)
    model = train([data.domain("photo")], wild, tmp_path / "m", tick=lambda *_, accuracy, loss: looks.append(accuracy))
    assert looks == sorted(looks)
    photo = data.domain("photo")
    held_out = split(photo.labels, wild.seed)[1]
    assert accuracy(model, photo.images[held_out], photo.labels[held_out]) == pytest.approx(looks[-1])


def test_the_learning_rate_falls_to_a_tenth_twice(data, recipe, tmp_path):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    train([data.domain("photo")], dataclasses.replace(recipe, lr=1e-3, steps=20, batch=2, every=20), tmp_path / "m")
    hook.remove()
    assert rates == pytest.approx([1e-3] * 14 + [1e-4] * 4 + [1e-5] * 2)


def test_training_sees_every_image_changed(data, recipe, tmp_path):
    """Of one picture over and over, no two images are alike, and none is the picture."""
    photo = data.domain("photo")
    same = dataclasses.replace(photo, images=np.repeat(photo.images[:1], len(photo), axis=0))
    seen = [torch.from_numpy(photo.images[:1].copy()) / 255]
    hook = register_module_forward_pre_hook(
        lambda module, given: seen.append(given[0]) if isinstance(module, Classifier) and module.training else None
    )
    train([same], dataclasses.replace(recipe, steps=3), tmp_path / "m")
    hook.remove()
    images = torch.cat(seen).flatten(1)
    assert len(images) == 1 + 3 * recipe.batch
    assert (torch.pdist(images) > 0.1).all()


def test_checkpoints_keep_coming_and_take_a_twentieth_of_the_time(data, recipe, tmp_path, monkeypatch):
    """By a clock that moves on a second whenever it is looked at: a checkpoint takes one, and the next waits for 20."""
    clock = itertools.count()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    saved, path = [], tmp_path / "m"

    def look(*_, **__):
        metadata = tensorfile.read_metadata(path.with_name("m.progress"))
        saved.append(json.loads(metadata["position"])["step"])

    train([data.domain("photo")], dataclasses.replace(recipe, steps=60, batch=2, every=1), path, tick=look)
    assert saved == [1, 20, 20, 39, 39, 58]


def test_a_finished_training_is_not_repeated(data, trained, recipe):
    before = trained.read_bytes()
    train_source(data, "sketch", recipe, trained, tick=lambda *_, **__: pytest.fail("trained again"))
    assert trained.read_bytes() == before


CODE = """
    import sys
    from safer_tta.data import StreamSpec, open_dataset
    from safer_tta.training import *
    from safer_tta.bench.run import Run, Setting, perform
    from pathlib import Path
    folder, what = Path(sys.argv[1]), sys.argv[2]
    data = open_dataset("synthetic", count=70)
    def told(done, total, **figures):
        print(done, flush=True)
        sys.stdin.readline()  # until it may go on
    if what == "train":
        recipe = source_recipe("synthetic", steps=24, batch=8, every=12)
        train_source(data, "sketch", recipe, folder / "source.safetensors", tick=told)
    if what == "run":
        sketch = data.domain("sketch")
        setting = Setting((sketch,), (sketch.images[::-1],), THREAT, folder / "source.safetensors")
        run = Run(method="tent", stream=StreamSpec(batch=5, attack_rate=40))
        perform(run, setting, folder / "runs", tick=told, save_seconds=0)
"""


def kill_and_finish(folder, what, moments):
    """Kill the work soon after each of these moments, then let it end: what every process reported first."""
    command = [sys.executable, "-c", textwrap.dedent(CODE), str(folder), what]
    began = [killed_after(moment, command) for moment in moments]
    last = subprocess.run(command, input=100 * "\n", check=True, capture_output=True, text=True)
    return [*began, int(last.stdout.split()[0])]


def killed_after(moment, command):
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        began = reached = int(process.stdout.readline())
        while reached < moment:
            print(file=process.stdin, flush=True)
            reached = int(process.stdout.readline())
        print(file=process.stdin, flush=True)  # it goes on, and dies in whatever it is at
        process.kill()
    assert process.returncode == -signal.SIGKILL
    return began


def test_training_killed_again_and_again_ends_the_same(data, recipe, tmp_path):
    """It reports every ten steps and is saved after twelve: who went on from there has no tenth step to report."""
    undisturbed = tmp_path / "undisturbed.safetensors"
    train_source(data, "sketch", dataclasses.replace(recipe, every=12), undisturbed)
    assert kill_and_finish(tmp_path / "killed", "train", (20, 20)) == [10, 20, 20]
    expected, got = tensorfile.read(undisturbed), tensorfile.read(tmp_path / "killed" / "source.safetensors")
    assert expected[1] == got[1]
    assert all(torch.equal(t, got[0][n]) for n, t in expected[0].items())
    assert [p.name for p in (tmp_path / "killed").iterdir()] == ["source.safetensors"]


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_training_interrupted_on_cuda_goes_on(data, recipe, tmp_path, compile):
    path, quick = tmp_path / "source.safetensors", dataclasses.replace(recipe, steps=8)

    def interrupted(done, total, **figures):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at the first report, step 8, with the checkpoint of step 4 behind it
        train_source(data, "sketch", quick, path, device="cuda", compile=compile, tick=interrupted)
    assert path.with_name("source.safetensors.progress").exists()
    train_source(data, "sketch", quick, path, device="cuda", compile=compile)
    assert path.exists()


TIMING = {"ms_per_step", "images_per_s", "peak_mb", "check"}


def test_a_run_killed_again_and_again_ends_the_same(data, trained, tmp_path):
    """It goes on with the batch after those it had saved, and with the method as it was then."""
    sketch = data.domain("sketch")
    (tmp_path / "source.safetensors").write_bytes(trained.read_bytes())
    setting = Setting((sketch,), (sketch.images[::-1],), THREAT, trained)
    run = Run(method="tent", stream=StreamSpec(batch=5, attack_rate=40))
    expected = perform(run, setting, tmp_path / "undisturbed")
    first, second, third = kill_and_finish(tmp_path, "run", (4, 9))
    assert first == 1
    assert 4 < second <= 9 < third
    got = perform(run, setting, tmp_path / "runs")
    assert {k: v for k, v in got.items() if k not in TIMING} == {k: v for k, v in expected.items() if k not in TIMING}
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_row_says_what_was_measured(data, trained, tmp_path):
    sketch = data.domain("sketch")
    setting = Setting((sketch,), (sketch.images[::-1].copy(),), THREAT, trained)
    run = Run(stream=StreamSpec(batch=16, attack_rate=25, limit=64))
    row = perform(run, setting, tmp_path)
    assert (row["dataset"], row["target"], row["method"], row["predictor"]) == ("synthetic", "sketch", "tent", "safer")
    assert (row["images"], row["batches"], row["attack_rate"], row["attacked_share"]) == (64, 4, 25, 25)
    assert row["accuracy"] == pytest.approx((row["accuracy_attacked"] + 3 * row["accuracy_clean"]) / 4)
    assert row["accuracy"] == pytest.approx(np.mean(row["batch_accuracy"]))
    assert len(row["per_class"]) == 7
    assert len(row["reliability"]) == len(row["dropped_share"]) == 5
    assert sum(row["dropped_share"]) <= 1
    assert row["stream"]
    assert row["source"]
    assert perform(run, setting, tmp_path) == row


def test_runs_that_differ_have_rows_of_their_own(data, trained, recipe, tmp_path):
    """In whatever: nobody is handed the row of another method, stream or model."""
    other = tmp_path / "other.safetensors"
    train_source(data, "sketch", dataclasses.replace(recipe, steps=1), other)
    sketch = data.domain("sketch")
    setting = Setting((sketch,), (sketch.images[::-1],), THREAT, trained)
    run = Run(stream=StreamSpec(attack_rate=25, limit=6, batch=3))
    asked = [
        (run, setting),
        (dataclasses.replace(run, method="pl"), setting),
        (dataclasses.replace(run, options={"lr": 0.1}), setting),
        (dataclasses.replace(run, predictor="plain"), setting),
        (dataclasses.replace(run, predictor_options={"views": 2}), setting),
        (dataclasses.replace(run, stream=dataclasses.replace(run.stream, seed=1)), setting),
        (run, dataclasses.replace(setting, source=other)),
        (run, dataclasses.replace(setting, attacked=(255 - sketch.images,))),
        (run, dataclasses.replace(setting, domains=(dataclasses.replace(sketch, content="other images"),))),
    ]
    rows = [perform(*each, tmp_path / "runs") for each in asked]
    assert len({row["run"] for row in rows}) == len(asked)
    assert [perform(*each, tmp_path / "runs") for each in asked] == rows


def test_rolling_and_calibration():
    assert rolling([0, 100, 50], 2) == [0, 50, 75]
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    # two at 0.9 of which one is right, one at 0.6 that is right
    assert calibration_error(probs, torch.tensor([1.0, 0.0, 1.0])) == pytest.approx((0.8 + 0.4) / 3)


def test_another_trainings_progress_is_refused(data, recipe, tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    monkeypatch.setattr(trainer._Training, "_write", lambda self: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        train_source(data, "sketch", recipe, path)
    assert not path.exists(), "nothing half-written is left as good"
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another training"):
        train_source(data, "sketch", dataclasses.replace(recipe, lr=1e-3), path)
    train_source(data, "sketch", recipe, path)
    assert path.exists()


def test_a_checkpoint_of_another_architecture_is_refused(data, trained, tmp_path):
    with pytest.raises(ValueError, match="does not fit this architecture"):
        train_source(data, "sketch", Recipe(architecture="resnet18", weights=str(trained), steps=1), tmp_path / "x")
    with pytest.raises(ValueError, match="not a trained model"):
        load(SHIPPED)


def test_a_wrong_target_is_named_before_the_training(data, recipe, tmp_path):
    with pytest.raises(ValueError, match="no domain 'clipart'"):
        train_source(data, "clipart", recipe, tmp_path / "x")


def test_robust_training_sees_attacked_images(data, recipe, tmp_path, monkeypatch):
    seen = []
    real = trainer.pgd
    monkeypatch.setattr(trainer, "pgd", lambda *a, **k: seen.append(k) or real(*a, **k))
    train_source(data, "sketch", robust(dataclasses.replace(recipe, steps=3), steps=2), tmp_path / "r")
    assert [(k["eps"], k["steps"]) for k in seen] == [(8 / 255, 2)] * 3
    train_source(data, "sketch", dataclasses.replace(recipe, steps=3), tmp_path / "e")
    hardened, usual = (tensorfile.read(tmp_path / name)[0]["conv1.weight"] for name in "re")
    assert not torch.equal(hardened, usual), "and learns from them"


def test_the_surrogate_falls_and_its_images_are_made_once(data, tmp_path):
    sketch = data.domain("sketch")
    surrogate = train_surrogate(sketch, surrogate_recipe("synthetic", steps=60, batch=32), tmp_path / "s")
    store = ArrayStore(tmp_path / "a")
    attacked = attacked_copies(sketch, surrogate, store, source="s")
    assert np.abs(attacked.astype(int) - sketch.images).max() == 8
    assert accuracy(surrogate, sketch.images, sketch.labels) > 60
    assert accuracy(surrogate, attacked, sketch.labels) < 5
    other = attacked_copies(sketch, surrogate, store, source="s", threat={"eps": 4 / 255})
    assert np.abs(other.astype(int) - sketch.images).max() == 4
    assert len(list((tmp_path / "a").iterdir())) == 2
    with pytest.raises(ValueError, match="8/255"):
        attacked_copies(sketch, surrogate, store, source="s", threat={"eps": 8})


def test_attacked_copies_are_of_one_surrogate_seed_and_domain(data, trained, tmp_path):
    """A store gives nobody the copies that another attacker made, or of other images."""
    few = excerpt(data.domain("sketch"), 4, seed=0)
    other = excerpt(data.domain("sketch"), 4, seed=1)
    surrogate, threat = load(trained), {"steps": 1}
    store = ArrayStore(tmp_path)
    asked = [
        (few, {"source": "one"}),
        (few, {"source": "another"}),
        (few, {"source": "one", "seed": 1}),
        (other, {"source": "one"}),
        (few, {"source": "one", "threat": {"steps": 2}}),
    ]
    made = [attacked_copies(domain, surrogate, store, **{"threat": threat, **how}) for domain, how in asked]
    assert len(list(tmp_path.iterdir())) == len(asked)
    assert not np.array_equal(made[0], made[2]), "another seed is another random start"
    for (domain, _), copies in zip(asked, made, strict=True):
        assert np.abs(copies.astype(int) - domain.images).max() <= 8


def test_training_sees_one_image_in_ten_in_grey():
    images = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0)).expand(1000, 3, 6, 6)
    out = augment(images, torch.Generator().manual_seed(1))
    grey = (out.amax(dim=1) - out.amin(dim=1) < 1e-6).flatten(1).all(dim=1)
    assert 0.06 < grey.double().mean() < 0.14  # four standard deviations about 0.1


def test_augmentation_is_a_draw_per_image():
    images = torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(0)).expand(8, 3, 20, 20)
    out = augment(images, torch.Generator().manual_seed(1))
    assert out.shape == images.shape
    assert 0 <= out.min() <= out.max() <= 1
    assert len({tuple(o.flatten()[:5].tolist()) for o in out}) == 8
    assert torch.equal(out, augment(images, torch.Generator().manual_seed(1)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_training_learns_the_same(data, tmp_path):
    """On attacked images, so that both its passes are programs: the attack's and the training's."""
    recipe = robust(source_recipe("synthetic", steps=3, batch=4, every=3), steps=1)
    models = [
        train_source(data, "sketch", recipe, tmp_path / f"{compile}.safetensors", compile=compile)
        for compile in (False, True)
    ]
    plain, compiled = (dict(model.model.named_parameters()) for model in models)
    for name, value in plain.items():
        assert torch.allclose(compiled[name], value, atol=2e-4), name


def test_a_model_remembers_the_side_of_its_images_and_its_classes(tmp_path):
    from safer_tta.training.trainer import check_classes, side_for

    dataset = open_dataset("synthetic", count=20)
    path = tmp_path / "model.safetensors"
    train_source(dataset, "sketch", source_recipe("synthetic", steps=1, batch=2, every=1), path)
    assert (side_for(path), side_for(path, 32)) == (64, 32)
    domain = dataset.domain("sketch")
    check_classes(path, domain)
    with pytest.raises(ValueError, match=r"knows the classes .* expected a model that was trained on this data"):
        check_classes(path, dataclasses.replace(domain, classes=("cat", "dog")))
