import time

import pytest

from safer_tta import executors
from tests.bench.helpers import kill_workers, quick, rows_of


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("kill", [False, True])
def test_ray_gives_the_same_rows(cluster, small, undisturbed, tmp_path, kill):
    study, place = quick(small, tmp_path)
    killed = []

    def report(event):
        if kill and event.what == "started" and event.task.kind == "source":
            until = time.monotonic() + 60
            while not killed and time.monotonic() < until:  # until it is under way
                killed.extend(kill_workers(b"ray::_work"))

    assert executors.execute("ray", study.tasks, place, report, threads=1) == {}
    assert bool(killed) == kill
    assert rows_of(study, place) == undisturbed
