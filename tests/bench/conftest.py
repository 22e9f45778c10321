"""One store for all studies of a test session."""

import os
from pathlib import Path

import pytest

from safer_tta import executors
from safer_tta.bench.publish import Study
from safer_tta.bench.results import Row
from safer_tta.bench.tasks import QUICK_COUNT, Place
from tests.bench.helpers import PLANS, SMALL, WORKERS, carry_out, quick, rows_of
from tests.serve.conftest import browser

__all__ = ["browser"]
IMAGES = 20  # of every stream: a whole batch and a shorter one


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that all processes of the test run share, as a store promises: each task is carried out once."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if WORKERS is None else base.parent) / "store"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of four runs."""
    path = tmp_path_factory.mktemp("plan") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def undisturbed(store: Path, small: Path) -> dict[str, Row]:
    """The rows of the small plan, made by one process that nothing disturbed."""
    study, place = quick(small, store)
    assert carry_out(study, place) == {}
    return rows_of(study, place)


@pytest.fixture(scope="session")
def everything(store: Path) -> tuple[dict[str, Study], Place]:
    """All shipped plans, carried out as one. Two processes of the test run begin at either end."""
    studies = {name: quick(name, store, images=IMAGES)[0] for name in PLANS}
    tasks = list({task.name: task for study in studies.values() for task in study.tasks}.values())
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        tasks.reverse()
    place = Place(store, count=QUICK_COUNT)
    assert executors.execute("local", tasks, place, lambda event: None, workers=WORKERS, threads=1) == {}
    return studies, place
