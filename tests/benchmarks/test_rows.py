import pytest


def test_rows_are_added_below_one_header_that_has_a_column_for_every_figure(script, tmp_path):
    rows, out = script("rows"), tmp_path / "new" / "rows.csv"
    assert rows.read(out) == []
    rows.append(out, ("what", "ms", "compile", "views"), {"what": "step", "ms": 1.23456, "compile": False})
    rows.append(out, ("what", "ms", "compile", "views"), {"what": "a, b", "ms": None, "views": 4})
    assert rows.read(out) == [
        {"what": "step", "ms": "1.23", "compile": "false", "views": ""},
        {"what": "a, b", "ms": "", "compile": "", "views": "4"},
    ]
    with pytest.raises(ValueError, match="seconds"):
        rows.append(out, ("what", "ms", "compile", "views"), {"seconds": 1.0})
