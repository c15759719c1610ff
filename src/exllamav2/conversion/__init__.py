"""What scripts import of the converter is in its modules; the converter itself is `exlm quantize`."""

__all__: list[str] = []
