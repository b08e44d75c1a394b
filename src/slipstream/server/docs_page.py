"""The page under /docs: the routes and their fields as one HTML file, made from the OpenAPI description. It loads nothing: no
script, no font, nothing from elsewhere, so that it works where there is no internet.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
code { font: 0.9em ui-monospace, monospace } h2 { border-top: 1px solid #ccc; padding-top: 1rem; font-size: 1.1rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0 }
tr + tr td { border-top: 1px solid #eee } .method { color: #06c }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } .method { color: #6bf }
h2 { border-color: #444 } tr + tr td { border-color: #333 } a { color: #6bf } }
"""


def docs_page(openapi: Mapping[str, Any]) -> str:
    """The page for an OpenAPI description."""
    info = openapi["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    routes = "".join(
        _route(method, path, route) for path, methods in openapi["paths"].items() for method, route in methods.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>{routes}</body></html>'
    )


def _route(method: str, path: str, route: Mapping[str, Any]) -> str:
    heading = f'<h2><code><span class="method">{html.escape(method.upper())}</span> {html.escape(path)}</code></h2>'
    return f"{heading}<p>{html.escape(route.get('description', ''))}</p>{_fields(route)}"


def _fields(route: Mapping[str, Any]) -> str:
    content = route.get("requestBody", {}).get("content", {})
    rows = "".join(row for body in content.values() for row in _rows(body["schema"]))
    return f"<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>{rows}</table>" if rows else ""


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else _code(field["default"]) if "default" in field else ""
        text = html.escape(field.get("description", ""))
        cells = (f"<code>{html.escape(name)}</code>", html.escape(_type(field)), default, text)
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type(field: Mapping[str, Any]) -> str:
    """`integer, 0 to 20`, `list of string`, `string or null`."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_type, field["anyOf"])))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    low, high = field.get("minimum"), field.get("maximum")
    bounds = f", {low} to {high}" if low is not None and high is not None else ""
    return kind + bounds


def _code(value: Any) -> str:
    return f"<code>{html.escape(repr(value) if isinstance(value, str) else str(value).lower())}</code>"
