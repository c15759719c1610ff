"""For `from exllamav2.device import …`."""

from exlm.legacy.internals import DeviceContext as ExLlamaV2DeviceContext
from exlm.legacy.internals import get_device_stream, global_streams, set_device_streams

__all__ = ["ExLlamaV2DeviceContext", "get_device_stream", "global_streams", "set_device_streams"]
