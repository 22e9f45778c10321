"""The API page: /openapi.json as plain HTML that loads nothing from other sites."""

from html import escape
from typing import Any


def render(schema: dict[str, Any]) -> str:
    rows = []
    for path, operations in schema["paths"].items():
        for verb, operation in operations.items():
            parameters = ", ".join(f"{p['name']} ({p['in']})" for p in operation.get("parameters", [])) or "–"
            bodies = ", ".join(operation.get("requestBody", {}).get("content", {})) or "–"
            answers = ", ".join(operation["responses"])
            cells = (f"{verb.upper()} {path}", operation.get("summary", ""), parameters, bodies, answers)
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th scope='col'>{name}</th>" for name in ("request", "what", "parameters", "body", "answers"))
    title = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}: the API"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        "<link rel='stylesheet' href='/dashboard/dashboard.css'></head>"
        f"<body><main><h1>{title}</h1><p>In full: <a href='/openapi.json'>/openapi.json</a></p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></main></body></html>"
    )
