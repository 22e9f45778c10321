"""A running service, which the tests of its addresses share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from safer_tta.client import Client
from tests.conftest import CHROMIUM, CHROMIUM_FLAGS
from tests.serve.helpers import Server, serving, trained


@pytest.fixture(scope="session")
def server(source_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(source_file, tmp_path_factory.mktemp("serve") / "served", "--rate", "100000") as running:
        yield running


@pytest.fixture(scope="session")
def new_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to roll out, which answers otherwise than the first one."""
    return trained(tmp_path_factory.mktemp("new") / "new.safetensors", steps=20)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def asking(server: Server) -> Iterator[Client]:
    with Client(server.url) as talking:
        yield talking
