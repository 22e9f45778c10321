def test_streams_are_measured_in_turns_and_side_by_side(run, tmp_path, monkeypatch):
    from safer_tta.models import statistics

    monkeypatch.setattr(statistics, "LEAST_DIVERSE", statistics.LEAST_DIVERSE)  # the script sets it
    rows = run("streams", tmp_path / "rows.csv", *["--streams", "2", "--batch", "2", "--side", "32", "--rounds", "2"])
    assert [row["what"] for row in rows] == ["turns", "side by side", "turns, packed", "side by side, packed"]
    assert [float(row["ratio"]) for row in rows if row["what"].startswith("turns")] == [1, 1]
    assert all(float(row["difference"]) < 1e-6 for row in rows)
    assert all(float(row["images_per_s"]) > 0 for row in rows)
