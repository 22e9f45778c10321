"""A small dataset, and a source model trained on it."""

from pathlib import Path

import pytest

from safer_tta.data import Dataset, open_dataset
from safer_tta.training import Recipe, source_recipe, train_source


@pytest.fixture(scope="session")
def data() -> Dataset:
    return open_dataset("synthetic", count=70)


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return source_recipe("synthetic", steps=24, batch=8, every=4)


@pytest.fixture(scope="session")
def trained(data: Dataset, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "source.safetensors"
    train_source(data, "sketch", recipe, path)
    return path
