"""The dialects of HTTP in which the server generates text.

A dialect is a module like `openai`, with a tuple of `Endpoint`s. It is added to `ENDPOINTS` here, from where
the application, its OpenAPI description, batches and the ingress of a cluster take it; nothing else has to
change.
"""

from __future__ import annotations

from . import openai
from .responses import Endpoint

ENDPOINTS: tuple[Endpoint, ...] = (*openai.ENDPOINTS,)
