"""Refused: how layers are shared among devices is not public."""

raise ImportError(
    "exllamav2.tensor_p does not exist in exlm: load with exlm.Model.load_tp() and make the cache with "
    "ExLlamaV2Cache_TP, which need nothing of it."
)
