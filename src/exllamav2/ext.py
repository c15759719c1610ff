"""For `from exllamav2.ext import …`: placeholders, which say what to use instead."""

from exlm.legacy.placeholders import (
    exllamav2_ext,
    make_c_ext,
    make_group_map,
    make_q_matrix,
    make_q_matrix_split,
    none_tensor,
)

__all__ = [
    "exllamav2_ext",
    "make_c_ext",
    "make_group_map",
    "make_q_matrix",
    "make_q_matrix_split",
    "none_tensor",
]
