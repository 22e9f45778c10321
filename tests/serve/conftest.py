"""A running service, which the tests of its addresses share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from safer_tta.client import Client
from tests.serve.helpers import Server, client, serving


@pytest.fixture(scope="session")
def server(source_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(source_file, tmp_path_factory.mktemp("serve") / "served", "--rate", "100000") as running:
        yield running


@pytest.fixture
def asking(server: Server) -> Iterator[Client]:
    with client(server) as talking:
        yield talking
