"""For `from exllamav2.server import …`."""

from exlm import __version__
from exlm.legacy.placeholders import WebSocketServer as ExLlamaV2WebSocketServer

__all__ = ["ExLlamaV2WebSocketServer", "__version__"]
