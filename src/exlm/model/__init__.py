"""Load a model and run it: `Model` turns a configuration, weight files and backends into logits.

It has loading, placement on devices, tensor and pipeline parallel, and the runner with its CUDA graphs. It
imports what is below (`spec`, `checkpoint`, `kernels`, `nn`, `kvcache`, `lora`, `parallel`); `generator`,
`llm`, `quantize` and what is above import it.
"""

from .model import Model
from .summary import MatrixSummary, Summary

__all__ = ["MatrixSummary", "Model", "Summary"]
