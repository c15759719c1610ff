"""The server: the OpenAI API over `exlm.AsyncGenerator`. It needs the packages of `exlm[server]`."""

from exlm import MissingExtra

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"The server, and batches, which are in its words, need further packages ({error}): "
        "pip install 'exlm[server]'"
    ) from None

from .app import Options, create_app
from .engine import Engine
from .errors import APIError, to_api_error
from .generation import GenerationRequest, ModelInfo, to_generation_request
from .health import Watchdog
from .keys import ApiKeys
from .limits import Limits
from .models import GeneratorParts, ModelSpec, load
from .openai import ResponseBuilder, output_delta
from .schema import ChatRequest, CompletionRequest
from .server import listen, serve

__all__ = [
    "APIError",
    "ApiKeys",
    "ChatRequest",
    "CompletionRequest",
    "Engine",
    "GenerationRequest",
    "GeneratorParts",
    "Limits",
    "ModelInfo",
    "ModelSpec",
    "Options",
    "ResponseBuilder",
    "Watchdog",
    "create_app",
    "listen",
    "load",
    "output_delta",
    "serve",
    "to_api_error",
    "to_generation_request",
]
