"""Load a model and run it: `Model` turns a configuration, weight files and backends into logits.

It has loading, placement on devices, tensor and pipeline parallel, and the runner with its CUDA graphs. It
imports what is below (`spec`, `checkpoint`, `kernels`, `nn`, `kvcache`, `lora`, `parallel`); `generator`,
`llm`, `quantize` and what is above import it.

To add a kind of layer: `spec` describes it, `nn` has its module, `Builder.block` builds that, `kv_shapes` says
what the cache stores for it, and `PagedModelRunner` puts each sequence's place in that cache into the batch. A
second head takes the state that `Decoder.forward` returns beside the logits.
"""

from .model import Model
from .summary import MatrixSummary, Summary

__all__ = ["MatrixSummary", "Model", "Summary"]
