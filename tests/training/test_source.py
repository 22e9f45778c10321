import dataclasses

import pytest
import torch

from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidValueError, UnknownNameError
from safer_tta.training import robust, source_recipe, surrogate_recipe, train_source, trainer


def test_defaults_are_the_papers_and_only_the_small_network_needs_no_weights():
    recipe = source_recipe("pacs", weights="imagenet.safetensors")
    assert (recipe.architecture, recipe.steps, recipe.batch, recipe.lr) == ("resnet18", 5000, 32, 5e-5)
    assert robust(recipe).attack == {"eps": 8 / 255, "step": 2 / 255, "steps": 20}
    assert surrogate_recipe("pacs", weights="imagenet.safetensors").seed != recipe.seed
    with pytest.raises(InvalidValueError, match="weights"):
        source_recipe("pacs")
    assert source_recipe("pacs", weights=None).weights is None


def test_unknown_target_is_refused_before_the_training(data, recipe, tmp_path):
    with pytest.raises(UnknownNameError, match="domain 'clipart' is unknown"):
        train_source(data, "clipart", recipe, tmp_path / "x")


def test_robust_training_sees_attacked_images(data, recipe, tmp_path, monkeypatch):
    seen, real = [], trainer.pgd
    monkeypatch.setattr(trainer, "pgd", lambda *a, **k: seen.append(k) or real(*a, **k))
    short = dataclasses.replace(recipe, steps=3)
    train_source(data, "sketch", robust(short, steps=2), tmp_path / "robust")
    assert [(k["eps"], k["steps"]) for k in seen] == [(8 / 255, 2)] * 3
    train_source(data, "sketch", short, tmp_path / "erm")
    weights = [safetensors_io.read(tmp_path / name)[0]["conv1.weight"] for name in ("robust", "erm")]
    assert not torch.equal(*weights), "it learns from them"
