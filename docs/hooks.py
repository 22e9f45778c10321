"""A mkdocs hook that puts figures and tables from docs/results/facts.json into pages; see docs/facts.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

FACTS = Path(__file__).parent / "results" / "facts.json"
ASKED = re.compile(r"\{\{\s*(table:)?\s*(.+?)\s*\}\}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace `{{ key }}` by a cell and `{{ table: key }}` by a table.

    Raises:
        PluginError: If there is no such key; the build stops.
    """
    return replace(markdown, json.loads(FACTS.read_text()), page.file.src_uri)


def replace(markdown: str, facts: dict[str, dict[str, str]], where: str) -> str:
    def text(asked: re.Match[str]) -> str:
        kind, key = "tables" if asked[1] else "cells", asked[2]
        if key not in facts[kind]:
            raise PluginError(f"{where}: {key!r} is not among the {kind} of docs/results/facts.json")
        return facts[kind][key]

    return ASKED.sub(text, markdown)
