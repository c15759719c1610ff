"""For `from exllamav2.server import …`."""

from exlm import __version__
from exlm.legacy.unavailable import WebSocketServer as ExLlamaV2WebSocketServer

__all__ = ["ExLlamaV2WebSocketServer", "__version__"]
