"""The published description of the routes, with what its library cannot know: the events of streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .replies import ChatChunk, CompletionReply, ErrorReply

PLACE = "#/components/schemas/{model}"
EVENTS: tuple[type[BaseModel], ...] = (ChatChunk, CompletionReply, ErrorReply)


def streamed(event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The replies of a route that may stream: what each event says, until the last one."""
    models = [{"$ref": PLACE.format(model=one.__name__)} for one in (event, ErrorReply)]
    said = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": models}}
    data = {"anyOf": [{"const": "[DONE]"}, said]}
    schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {200: {"content": {"text/event-stream": {"schema": schema}}}}


class Described(FastAPI):
    """An application whose description has the models of events, which no route returns as they are."""

    def openapi(self) -> dict[str, Any]:
        """The description; it is made once."""
        if self.openapi_schema is None:
            listed = [(model, "serialization") for model in EVENTS]
            models = models_json_schema(listed, ref_template=PLACE)[1]["$defs"]  # type: ignore[arg-type]
            schemas = super().openapi()["components"]["schemas"]
            schemas.update({name: model for name, model in models.items() if name not in schemas})
        return super().openapi()
