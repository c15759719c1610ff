"""The HTTP server: the OpenAI API over `exlm.AsyncGenerator`.

It takes models by name (`ModelSpec`) and gives an application (`create_app`) or a running server (`serve`); a
request becomes a `GenerationRequest`, the engine runs it, and a dialect's writer turns its output into the
response. `batch`, `scale` and `cli` may import it; it imports only the public `exlm`, and needs the packages
of `exlm[server]`.
"""

from exlm import MissingExtra

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"The server, and batches, which are in its words, need further packages ({error}): pip install 'exlm[server]'"
    ) from None

from .app import Options, create_app
from .engine import Engine
from .errors import APIError, to_api_error
from .generation import GenerationRequest, ModelInfo, output_delta, to_generation_request
from .limits import Limits
from .middleware import ApiKeys
from .models import GeneratorParts, ModelSpec, load
from .monitoring import Watchdog
from .openai import response_writer
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
    "Watchdog",
    "create_app",
    "listen",
    "load",
    "output_delta",
    "response_writer",
    "serve",
    "to_api_error",
    "to_generation_request",
]

NAMES_OF_0_1 = {
    "Answer": "response_writer",
    "Bounds": "Limits",
    "Host": "ModelInfo",
    "Keyring": "ApiKeys",
    "Listing": "ModelSpec",
    "Loaded": "GeneratorParts",
    "Order": "GenerationRequest",
    "Problem": "APIError",
    "order_of": "to_generation_request",
    "piece_of": "output_delta",
    "problem_of": "to_api_error",
}
"""Public names of version 0.1 that still work, and what they are called now."""

globals().update({old: globals()[new] for old, new in NAMES_OF_0_1.items()})
