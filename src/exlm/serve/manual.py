"""The published description as a page to read: plain HTML, no script, and nothing from any other server."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}: what it answers</title>
<link rel="icon" href="icon.svg">
</head>
<body>
<h1>{title} {version}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>. What is not marked may be left out.</p>
"""
LARGE = 2**31 - 1
"""Beyond it a limit is no news."""
BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "minLength": "at least {} long",
    "maxLength": "at most {} long",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}


def docs_page(described: Mapping[str, Any]) -> str:
    """An OpenAPI description, written out: every route, and every object that one takes or gives."""
    parts = [
        HEAD.format(title=escape(described["info"]["title"]), version=escape(described["info"]["version"]))
    ]
    for path, methods in described["paths"].items():
        parts += [_route(method, path, route) for method, route in methods.items()]
    parts.append("<h1>Objects</h1>\n")
    parts += [_object(name, model) for name, model in sorted(described["components"]["schemas"].items())]
    return "".join([*parts, "</body>\n</html>\n"])


def _route(method: str, path: str, route: Mapping[str, Any]) -> str:
    told = f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n<p>{escape(route['description'])}</p>\n"
    kinds = [("takes", route.get("requestBody", {}))]
    kinds += [("gives", reply) for status, reply in route["responses"].items() if status.startswith("2")]
    for word, one in kinds:
        words = [_words(kind["schema"]) for kind in one.get("content", {}).values() if kind.get("schema")]
        told += f"<p>{word} {', or as events '.join(words)}</p>\n" if words else ""
    return told


def _object(name: str, model: Mapping[str, Any]) -> str:
    needed = model.get("required", ())
    rows = []
    for field, kind in model.get("properties", {}).items():
        mark = "needed" if field in needed else ""
        rows.append(f"<tr><td><code>{escape(field)}</code><td>{_words(kind)}<td>{mark}</tr>\n")
    table = f"<table>\n{''.join(rows)}</table>\n" if rows else ""
    return (
        f'<h3 id="{escape(name)}">{escape(name)}</h3>\n<p>{escape(model.get("description", ""))}</p>\n{table}'
    )


def _words(kind: Mapping[str, Any]) -> str:
    """What a schema asks for, as HTML."""
    if "$ref" in kind:
        name = escape(kind["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in kind:
            return " or ".join(_words(one) for one in kind[several] if one.get("type") != "null")
    if "contentSchema" in kind:
        return _words(kind["contentSchema"])
    if "enum" in kind or "const" in kind:
        return " or ".join(
            f"<code>{escape(str(one))}</code>" for one in kind.get("enum", [kind.get("const")])
        )
    if kind.get("type") == "array":
        return _bounded(f"a list of {_words(kind.get('items', {}))}", kind)
    if "data" in kind.get("properties", {}):
        return _words(kind["properties"]["data"])
    return _bounded(escape(str(kind.get("type", "anything"))), kind)


def _bounded(words: str, kind: Mapping[str, Any]) -> str:
    limits = [
        told.format(f"{kind[name]:g}") for name, told in BOUNDS.items() if abs(kind.get(name, LARGE)) < LARGE
    ]
    return f"{words} ({', '.join(limits)})" if limits else words
