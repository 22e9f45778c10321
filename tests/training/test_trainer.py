import dataclasses
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from safer_tta import Classifier, load_classifier
from safer_tta._internal import safetensors_io
from safer_tta.data import excerpt, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.errors import InvalidValueError
from safer_tta.models.card import read_card
from safer_tta.training import SHIPPED, Recipe, robust, source_recipe, train, train_source, trainer
from safer_tta.training.trainer import accuracy, check_classes, recipe_of, split
from tests.conftest import WEIGHTS, needs_cuda, needs_weights
from tests.processes import gate, kill_and_finish


@pytest.mark.parametrize("change", [{"steps": 0}, {"batch": -1}, {"every": 0}, {"lr": 0.0}])
def test_invalid_recipes_are_refused(change):
    with pytest.raises(InvalidValueError, match=f"{next(iter(change))} is .*; expected"):
        Recipe(**change)


def test_split_is_stratified():
    labels = np.repeat([0, 1, 2], [50, 10, 5])
    training, validation = split(labels, seed=0)
    assert np.bincount(labels[training]).tolist() == [40, 8, 4]
    assert sorted([*training, *validation]) == list(range(65))
    assert not np.array_equal(training, split(labels, seed=1)[0]), "every seed validates on other images"


def test_training_learns_and_keeps_the_best(data, trained):
    model = load_classifier(trained)
    described = recipe_of(trained)
    assert described["accuracy"] > 2 / 7, "24 steps from the backbone are better than chance"
    assert set(described["domains"]) == {"photo", "painting", "cartoon"}
    others = [(d, split(d.labels, 0)[1]) for d in map(data.domain, described["domains"])]
    images, labels = (np.concatenate([getattr(d, part)[v] for d, v in others]) for part in ("images", "labels"))
    assert accuracy(model, images, labels) / 100 == pytest.approx(described["accuracy"])


def test_the_best_model_of_a_wild_training_is_kept(data, recipe, tmp_path):
    """With steps so large that it gets worse again, the best accuracy so far never falls, and its model is written."""
    seen = []
    wild = dataclasses.replace(recipe, lr=0.3, steps=60, batch=2, every=10)
    model = train([data.domain("photo")], wild, tmp_path / "m", tick=lambda *_, accuracy, loss: seen.append(accuracy))
    assert seen == sorted(seen)
    photo = data.domain("photo")
    held_out = split(photo.labels, wild.seed)[1]
    assert accuracy(model, photo.images[held_out], photo.labels[held_out]) == pytest.approx(seen[-1])


def test_the_learning_rate_falls_to_a_tenth_twice(data, recipe, tmp_path):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    train([data.domain("photo")], dataclasses.replace(recipe, lr=1e-3, steps=20, batch=2, every=20), tmp_path / "m")
    hook.remove()
    assert rates == pytest.approx([1e-3] * 14 + [1e-4] * 4 + [1e-5] * 2)


def test_every_image_is_augmented(data, recipe, tmp_path):
    """Of one picture over and over, no two training images are alike, and none is the picture."""
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_training_learns_the_same(data, tmp_path):
    """On attacked images, so that both its passes are compiled: the attack's and the training's."""
    recipe = robust(source_recipe("synthetic", steps=3, batch=4, every=3), steps=1)
    plain, compiled = (
        dict(train_source(data, "sketch", recipe, tmp_path / str(compile), compile=compile).model.named_parameters())
        for compile in (False, True)
    )
    for name, value in plain.items():
        assert torch.allclose(compiled[name], value, atol=2e-4), name


@needs_weights
def test_the_imagenet_network_trains_and_loads_again(data, tmp_path):
    """Its stride is on the first 1x1 convolution; the file must say so, or it could not be loaded."""
    recipe = Recipe(architecture="resnet50", weights=str(WEIGHTS), steps=1, batch=2, every=1)
    trained = train([excerpt(data.domain("photo"), 14, seed=0)], recipe, tmp_path / "m.safetensors")
    again = load_classifier(tmp_path / "m.safetensors")
    assert again.model.layer2[0].conv1.stride == (2, 2)
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(trained.eval()(x)[1], again(x)[1])
    assert torch.equal(trained.mean, again.mean)


def test_a_finished_training_is_not_repeated_and_another_is_refused(data, trained, recipe):
    before = trained.read_bytes()
    train_source(data, "sketch", recipe, trained, tick=lambda *_, **__: pytest.fail("trained again"))
    assert trained.read_bytes() == before
    for other in (dataclasses.replace(recipe, seed=5), dataclasses.replace(recipe, architecture="resnet18")):
        with pytest.raises(InvalidValueError, match="another training"):
            train_source(data, "sketch", other, trained)
    with pytest.raises(InvalidValueError, match="domains differ"):
        train_source(data, "photo", recipe, trained)


def test_a_file_that_is_not_a_model_for_this_is_refused(data, trained, tmp_path):
    with pytest.raises(InvalidValueError, match="does not fit this architecture"):
        train_source(data, "sketch", Recipe(architecture="resnet18", weights=str(trained), steps=1), tmp_path / "x")
    with pytest.raises(InvalidValueError, match="holds weights without"):
        load_classifier(SHIPPED)


def test_the_backbone_is_shipped_and_small():
    assert SHIPPED.stat().st_size < 1_000_000
    assert safetensors_io.read_metadata(SHIPPED)["architecture"] == "small"


def test_the_place_of_the_weights_does_not_matter(data, recipe, tmp_path):
    hashes = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        weights = shutil.copy(SHIPPED, tmp_path / place / "w.safetensors")
        path = tmp_path / f"{place}.safetensors"
        train_source(data, "sketch", dataclasses.replace(recipe, steps=1, weights=str(weights)), path)
        hashes.add(digest_file(path))
    assert len(hashes) == 1


def test_a_model_remembers_the_side_of_its_images_and_its_classes(data, trained):
    assert read_card(trained).side == 64
    domain = data.domain("sketch")
    check_classes(trained, domain)
    with pytest.raises(InvalidValueError, match=r"knows the classes .* expected a model that was trained on this data"):
        check_classes(trained, dataclasses.replace(domain, classes=("cat", "dog")))


def test_checkpoints_take_a_twentieth_of_the_time(data, recipe, tmp_path, monkeypatch):
    """The clock moves on by a second at every look: a checkpoint takes one second, and the next waits for 20."""
    clock = itertools.count()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    saved, path = [], tmp_path / "m"

    def look(*_, **__):
        metadata = safetensors_io.read_metadata(path.with_name("m.progress"))
        saved.append(json.loads(metadata["position"])["step"])

    train([data.domain("photo")], dataclasses.replace(recipe, steps=60, batch=2, every=1), path, tick=look)
    assert saved == [1, 20, 20, 39, 39, 58]


def train_gated(recipe, path, connection):
    train_source(open_dataset("synthetic", count=70), "sketch", recipe, path, tick=gate(connection))


def test_a_training_that_is_killed_again_and_again_ends_the_same(data, recipe, tmp_path):
    """It reports every ten steps and is saved after twelve, so a resumed training does not report its tenth step."""
    recipe = dataclasses.replace(recipe, every=12)
    undisturbed, killed = tmp_path / "undisturbed.safetensors", tmp_path / "killed" / "source.safetensors"
    train_source(data, "sketch", recipe, undisturbed)
    assert kill_and_finish(train_gated, recipe, killed, moments=(20, 20)) == [10, 20, 20]
    assert killed.read_bytes() == undisturbed.read_bytes()
    assert list(killed.parent.iterdir()) == [killed]


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
def test_an_interrupted_training_resumes_on_cuda(data, recipe, tmp_path, compile):
    path, quick = tmp_path / "source.safetensors", dataclasses.replace(recipe, steps=8)

    def interrupt(done, total, **figures):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at the first report, step 8, with the checkpoint of step 4 behind it
        train_source(data, "sketch", quick, path, device="cuda", compile=compile, tick=interrupt)
    assert path.with_name("source.safetensors.progress").exists()
    train_source(data, "sketch", quick, path, device="cuda", compile=compile)
    assert path.exists()


def test_another_trainings_progress_is_refused(data, recipe, tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    monkeypatch.setattr(trainer._Training, "_write", lambda self: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        train_source(data, "sketch", recipe, path)
    assert not path.exists(), "no incomplete file is left under the model's name"
    monkeypatch.undo()
    with pytest.raises(InvalidValueError, match="another training"):
        train_source(data, "sketch", dataclasses.replace(recipe, lr=1e-3), path)
    train_source(data, "sketch", recipe, path)
    assert path.exists()
