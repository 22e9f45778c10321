"""Rows in TensorBoard."""

from __future__ import annotations

import pytest

from safer_tta.bench.sinks import create


def test_a_sink_gets_every_row(undisturbed, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send = create("tensorboard", tmp_path)
    row = {**next(iter(undisturbed.values())), "ms_per_step": 1.0, "images_per_s": 2.0, "peak_mb": None}
    send("a run", row)
    events = EventAccumulator(str(tmp_path / "tensorboard" / row["run"]))
    events.Reload()
    assert events.Scalars("accuracy")[0].value == pytest.approx(row["accuracy"])
    assert len(events.Scalars("rolling accuracy")) == row["batches"]
    assert "peak_mb" not in events.Tags()["scalars"]


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'cloud' is unknown; expected one of mlflow, tensorboard"):
        create("cloud", tmp_path)
