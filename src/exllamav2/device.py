"""For `from exllamav2.device import …`."""

from exlm.legacy.devices import get_device_stream, global_streams, set_device_streams
from exlm.legacy.placeholders import DeviceContext as ExLlamaV2DeviceContext

__all__ = ["ExLlamaV2DeviceContext", "get_device_stream", "global_streams", "set_device_streams"]
