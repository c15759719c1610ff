"""For `from exllamav2.conversion.qparams import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import (
    QParams,
    get_qparams_reduced,
    qparams_attn,
    qparams_headoptions,
    qparams_mlp,
)

__all__ = ["QParams", "get_qparams_reduced", "qparams_attn", "qparams_headoptions", "qparams_mlp"]
