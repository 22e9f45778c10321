from safer_tta import executors
from safer_tta.bench.study import estimate, states
from tests.bench.helpers import quick


def test_asking_again_makes_nothing_again(everything):
    study, place = everything[0]["views"], everything[1]
    rows = [place.results.path(name) for name in study.runs]
    before = [path.stat().st_mtime_ns for path in rows]
    events = []
    assert executors.execute("local", study.tasks, place, events.append, workers=1, threads=1) == {}
    assert events == []
    assert [path.stat().st_mtime_ns for path in rows] == before
    assert estimate(study, place) == 0


def test_there_is_an_estimate_before_the_first_run(small, tmp_path):
    study, place = quick(small, tmp_path)
    assert estimate(study, place) > 0
    assert states(study, place) == {"not started": 4}
    place.results.folder.mkdir()
    place.results.progress(study.runs[0]).touch()
    assert states(study, place) == {"not started": 3, "incomplete": 1}
