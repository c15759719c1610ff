"""The OpenAPI description of the routes, and a page that shows it.

FastAPI cannot derive request bodies and stream events by itself: bodies are validated in `middleware`, off
the event loop if large, instead of by FastAPI on it, and routes return finished responses. The page is written
here because the documentation pages of FastAPI (Swagger UI, ReDoc) load scripts from other servers; this one
is plain HTML that works offline and under the server's Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from . import dialects
from .responses import EVENT_STREAM, Endpoint
from .schema import DetokenizeRequest, EmbeddingsRequest, ErrorReply, ModelRequest, TokenizeRequest

Mode = Literal["validation", "serialization"]
VALIDATION: Mode = "validation"
SERIALIZATION: Mode = "serialization"
SCHEMA_REF = "#/components/schemas/{model}"
MAX_SHOWN_BOUND = 2**31 - 1
"""Larger bounds are not shown."""
BOUNDS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "to {}",
    "minLength": "at least {} long",
    "maxLength": "at most {} long",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}


PAGE_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}: API</title>
<link rel="icon" href="icon.svg">
</head>
<body>
<h1>{title} {version}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>. Fields without a mark may be left out.</p>
"""


def event_types() -> list[Any]:
    return [*(endpoint.event_type for endpoint in dialects.ENDPOINTS), ErrorReply]


def request_types() -> list[type[BaseModel]]:
    generating = [endpoint.request_type for endpoint in dialects.ENDPOINTS]
    return [*generating, DetokenizeRequest, EmbeddingsRequest, ModelRequest, TokenizeRequest]


def request_body_of(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream_of(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    """The description of a stream's events: JSON objects, and what ends the stream."""
    models = {"anyOf": [{"$ref": SCHEMA_REF.format(model=one.__name__)} for one in (endpoint.event_type, ErrorReply)]}
    schema: dict[str, Any] = models
    if endpoint.writer.MEDIA_TYPE == EVENT_STREAM:
        content = {"type": "string", "contentMediaType": "application/json", "contentSchema": models}
        end = endpoint.writer.STREAM_END.removeprefix(b"data: ").strip().decode()
        data = {"anyOf": [*([{"const": end}] if end else []), content]}
        schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"content": {endpoint.writer.MEDIA_TYPE: {"schema": schema}}}}


class AppWithSchemas(FastAPI):
    """An application whose description includes the schemas of request bodies and stream events."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for types, mode in ((event_types(), SERIALIZATION), (request_types(), VALIDATION)):
                inputs = [(one, mode, TypeAdapter[Any](one)) for one in types]
                models = TypeAdapter.json_schemas(inputs, ref_template=SCHEMA_REF)[1]["$defs"]
                schemas.update({name: model for name, model in models.items() if name not in schemas})
        return super().openapi()


def docs_page(description: Mapping[str, Any]) -> str:
    """An OpenAPI description as a page: every route, and every object in requests and responses."""
    info, schemas = description["info"], description["components"]["schemas"]
    parts = [PAGE_HEAD.format(title=escape(info["title"]), version=escape(info["version"]))]
    for path, methods in description["paths"].items():
        parts += [_route_section(method, path, route) for method, route in methods.items()]
    parts.append("<h1>Objects</h1>\n")
    parts += [_object_section(name, schema) for name, schema in sorted(schemas.items())]
    return "".join([*parts, "</body>\n</html>\n"])


def _route_section(method: str, path: str, route: Mapping[str, Any]) -> str:
    section = f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n<p>{escape(route['description'])}</p>\n"
    bodies = [("takes", route.get("requestBody", {}))]
    bodies += [("gives", reply) for status, reply in route["responses"].items() if status.startswith("2")]
    for verb, body in bodies:
        types = [_type_html(media["schema"]) for media in body.get("content", {}).values() if media.get("schema")]
        section += f"<p>{verb} {', or as events '.join(types)}</p>\n" if types else ""
    return section


def _object_section(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for field, field_schema in schema.get("properties", {}).items():
        mark = "needed" if field in required else ""
        rows.append(f"<tr><td><code>{escape(field)}</code><td>{_type_html(field_schema)}<td>{mark}</tr>\n")
    table = f"<table>\n{''.join(rows)}</table>\n" if rows else ""
    description = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>\n<p>{description}</p>\n{table}'


def _type_html(schema: Mapping[str, Any]) -> str:
    """A JSON schema as HTML: a link, a type with its bounds, or alternatives."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_type_html(one) for one in schema[several] if one.get("type") != "null")
    if "contentSchema" in schema:
        return _type_html(schema["contentSchema"])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"<code>{escape(str(one))}</code>" for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return _bounded(f"a list of {_type_html(schema.get('items', {}))}", schema)
    if "data" in schema.get("properties", {}):
        return _type_html(schema["properties"]["data"])
    return _bounded(escape(str(schema.get("type", "anything"))), schema)


def _bounded(text: str, schema: Mapping[str, Any]) -> str:
    limits = [
        template.format(f"{schema[name]:g}")
        for name, template in BOUNDS.items()
        if abs(schema.get(name, MAX_SHOWN_BOUND)) < MAX_SHOWN_BOUND
    ]
    return f"{text} ({', '.join(limits)})" if limits else text
