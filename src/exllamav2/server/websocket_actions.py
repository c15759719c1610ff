"""For `from exllamav2.server.websocket_actions import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import dispatch

__all__ = ["dispatch"]
