"""The published description of the routes, with what the library cannot know: requests and events of streams.

Requests are validated in `body`, not by the library, which would do it on the event loop.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .response_schema import ChatChunk, CompletionReply, ErrorReply
from .schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ModelRequest,
    TokenizeRequest,
)

SCHEMA_REF = "#/components/schemas/{model}"
EVENT_MODELS: tuple[type[BaseModel], ...] = (ChatChunk, CompletionReply, ErrorReply)
REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ModelRequest,
    TokenizeRequest,
)


def request_body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """What a route that takes requests of a kind says of them."""
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream_of(event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The replies of a route that may stream: what each event says, until the last one."""
    models = [{"$ref": SCHEMA_REF.format(model=one.__name__)} for one in (event, ErrorReply)]
    said = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": models}}
    data = {"anyOf": [{"const": "[DONE]"}, said]}
    schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"content": {"text/event-stream": {"schema": schema}}}}


class AppWithSchemas(FastAPI):
    """An application whose description has the models of requests and events, which no route declares."""

    def openapi(self) -> dict[str, Any]:
        """The description; it is made once."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for kinds, mode in ((EVENT_MODELS, "serialization"), (REQUEST_MODELS, "validation")):
                listed = [(model, mode) for model in kinds]
                models = models_json_schema(listed, ref_template=SCHEMA_REF)[1]["$defs"]  # type: ignore[arg-type]
                schemas.update({name: model for name, model in models.items() if name not in schemas})
        return super().openapi()
