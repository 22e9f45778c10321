"""What the tests of packed models need around them."""

import sys
from collections.abc import Callable, Iterator

import pytest

from safer_tta import extensions
from safer_tta._internal import user_code


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
