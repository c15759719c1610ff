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

from .answer import Answer, piece_of
from .app import Options, create_app
from .engine import Engine
from .hosting import Listing, Loaded, load
from .keys import Keyring
from .limits import Bounds
from .problems import Problem, problem_of
from .running import listen, serve
from .schema import ChatRequest, CompletionRequest
from .translate import Host, Order, order_of
from .watchdog import Watchdog

__all__ = [
    "Answer",
    "Bounds",
    "ChatRequest",
    "CompletionRequest",
    "Engine",
    "Host",
    "Keyring",
    "Listing",
    "Loaded",
    "Options",
    "Order",
    "Problem",
    "Watchdog",
    "create_app",
    "listen",
    "load",
    "order_of",
    "piece_of",
    "problem_of",
    "serve",
]
