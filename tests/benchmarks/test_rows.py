"""Rows of measurements as CSV."""

from __future__ import annotations

import pytest


def test_rows_are_added_below_one_header(script, tmp_path):
    rows, out = script("rows"), tmp_path / "new" / "rows.csv"
    assert rows.read(out) == []
    rows.append(out, ("what", "ms", "compile", "views"), {"what": "step", "ms": 1.23456, "compile": False})
    rows.append(out, ("what", "ms", "compile", "views"), {"what": "a, b", "ms": None, "views": 4})
    assert rows.read(out) == [
        {"what": "step", "ms": "1.23", "compile": "false", "views": ""},
        {"what": "a, b", "ms": "", "compile": "", "views": "4"},
    ]


def test_a_figure_without_a_column_is_refused(script, tmp_path):
    with pytest.raises(ValueError, match="seconds"):
        script("rows").append(tmp_path / "rows.csv", ("what", "ms"), {"seconds": 1.0})
