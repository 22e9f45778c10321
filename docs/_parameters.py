"""For the API page: lines `name: what it is` of a docstring become a list, which Markdown would run together."""

from __future__ import annotations

import re
from typing import Any

import griffe

STARTS = re.compile(r"^([a-z_]+(?: \([A-Z0-9,]+\))?(?:, [a-z_]+)*): (?=\S)")


class Parameters(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        start = STARTS.match(line)
        if start:
            if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
                lines.append("")  # a list begins after an empty line
            line = f"- **{start[1]}**: {line[start.end() :]}"
        lines.append(line)
    return "\n".join(lines)
