"""What old scripts import of the old library's insides: its extension, files, streams and shares of tensors.

Where nothing needs doing, a function does nothing; where something is missing, using it says what to do.
"""

from __future__ import annotations

from typing import Any

import torch

from ..families.fields import RopeStyle as RopeStyle
from .placeholders import Unavailable, UnavailableObject, unavailable

EXTENSION = (
    "Nothing is compiled and no kernel is called by hand: load a model with exlm.Model, which chooses its "
    "kernels; model.explain() names them."
)

exllamav2_ext = UnavailableObject("exllamav2_ext", EXTENSION)
make_c_ext = unavailable("exllamav2.ext.make_c_ext", EXTENSION)
make_group_map = unavailable("exllamav2.ext.make_group_map", EXTENSION)
make_q_matrix = unavailable("exllamav2.ext.make_q_matrix", EXTENSION)
make_q_matrix_split = unavailable("exllamav2.ext.make_q_matrix_split", EXTENSION)

none_tensor = torch.empty((1, 1), device="meta")
"""What the extension was given where there is no tensor."""


class ArchParams(Unavailable):
    """Was an architecture, read from config.json."""

    remedy = (
        "A model is described by data: read config.arch, config.architecture and config.spec of exlm.Config."
    )


class SafetensorsFile(Unavailable):
    """Was a file of weights that is read tensor by tensor."""

    remedy = (
        "Files are opened while a model loads: use exlm.Model, config.tensor_file_map for where each tensor "
        "is, and safetensors.safe_open for single tensors."
    )


def cleanup_stfiles() -> None:
    """Nothing: no file stays open once a model is loaded."""


class DeviceContext(Unavailable):
    """Was one device's scratch memory and rotations."""

    remedy = (
        "A model keeps no scratch memory to ask for: load it with exlm.Model; config.device chooses where."
    )


global_streams: dict[int, Any] = {}
"""Streams that the library made for itself: it makes none, torch's current ones are used."""


def set_device_streams() -> None:
    """Nothing: torch's current streams are used as they are."""


def get_device_stream(index: int) -> None:
    """None: there is no stream of the library's own."""


class TPContext(Unavailable):
    """Was how layers are shared among devices."""

    remedy = (
        "Load with exlm.Model.load_tp(gpu_split) and make the cache with ExLlamaV2Cache_TP, which need "
        "nothing of it; model.tp_context says among how many ranks the model is shared."
    )


BROADCAST_KV, BROADCAST_ID, BROADCAST_VC, BROADCAST_RS, BROADCAST_Q = range(5)
"""Names of the ways to share a tensor."""


ROTATIONS = (
    "Rotations are made while a model loads: config.scale_pos_emb, scale_alpha_value, rotary_embedding_base "
    "and yarn_rope_factor of exlm.Config change them."
)

get_rope_params = unavailable("exllamav2.rope.get_rope_params", ROTATIONS)
gen_mrope_embed = unavailable("exllamav2.mrope.gen_mrope_embed", ROTATIONS)


class NgramCache(Unavailable):
    """Was what n-gram drafts were found in."""

    remedy = "Drafts from n-grams are made inside: ExLlamaV2DynamicGenerator(…, use_ngram_draft=True)."


class NgramCacheNode(NgramCache):
    """Was one n-gram and what followed it."""


IMAGES = (
    "This version has no vision tower: compute image embeddings elsewhere and pass them as "
    "ExLlamaV2MMEmbedding(model, embeddings)."
)


def _of_images(name: str) -> Any:
    return unavailable(f"exllamav2.vlm.{name}", IMAGES)


convert_to_rgb = _of_images("util.convert_to_rgb")
normalize_image = _of_images("util.normalize_image")
size_to_longest_edge_and_patch_size = _of_images("util.size_to_longest_edge_and_patch_size")
smart_resize = _of_images("util.smart_resize")
preprocess = _of_images("processor.preprocess")
postprocess = _of_images("processor.postprocess")
position_embeddings = _of_images("processor.position_embeddings")

dispatch = unavailable(
    "exllamav2.server.websocket_actions.dispatch",
    "There is no web-socket server: `exlm serve` streams over HTTP, with the OpenAI API.",
)
