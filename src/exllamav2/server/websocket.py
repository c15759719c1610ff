"""For `from exllamav2.server.websocket import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import WebSocketServer as ExLlamaV2WebSocketServer

__all__ = ["ExLlamaV2WebSocketServer"]
