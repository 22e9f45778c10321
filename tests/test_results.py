"""Pages of results are what their rows say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_methods_page_is_built_from_its_rows():
    spec = importlib.util.spec_from_file_location("methods_benchmark", ROOT / "benchmarks" / "methods.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    files = sorted((ROOT / "docs" / "results").glob("methods-*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(rows) == len({row["run"] for row in rows}) == 3 * 17 * 2 * 3
    page = (ROOT / "docs" / "results" / "methods.md").read_text()
    assert page.startswith(benchmark.page(rows))
