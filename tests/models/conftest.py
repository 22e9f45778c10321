"""What the tests of packed models need around them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safer_tta import Classifier, extensions
from safer_tta._internal import user_code
from safer_tta.models import zoo
from tests.models.parts import CLASSES, SIDE, spread


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Forget the files of the user's own that have been run, now and at the end of the test."""
    monkeypatch.setattr(user_code, "_files", {})
    monkeypatch.setattr(extensions, "_loaded", {})

    def forget() -> None:
        user_code._files.clear()
        extensions._loaded.clear()
        for name in [name for name in sys.modules if name.startswith(f"{user_code.PACKAGE}.")]:
            del sys.modules[name]

    forget()
    yield forget
    forget()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Classifier]:
    """A small model of the zoo in a file, and the classifier that was saved."""
    path = tmp_path_factory.mktemp("packed") / "small.safetensors"
    saved = Classifier(spread(zoo.create("small", num_classes=4)), mean=(0.5, 0.4, 0.3), std=0.25).eval()
    saved.save(path, architecture="small", arguments={"num_classes": 4}, classes=CLASSES, side=SIDE, resize="crop 0.9")
    return path, saved
