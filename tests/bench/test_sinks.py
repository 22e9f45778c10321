import pytest

from safer_tta.bench.sinks import SINKS


def test_a_sink_gets_every_row(undisturbed, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send = SINKS["tensorboard"](tmp_path / "tensorboard")
    row = {**next(iter(undisturbed.values())), "ms_per_step": 1.0, "images_per_s": 2.0, "peak_mb": None}
    send("a run", row)
    events = EventAccumulator(str(tmp_path / "tensorboard" / row["run"]))
    events.Reload()
    assert events.Scalars("accuracy")[0].value == pytest.approx(row["accuracy"])
    assert len(events.Scalars("rolling accuracy")) == row["batches"]
    assert "peak_mb" not in events.Tags()["scalars"]
