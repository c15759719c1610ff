"""Names that programs import from exllamav2 and that have no counterpart in exlm.

Scripts may import a placeholder, and `isinstance` with it is false. Using one raises `Unsupported`, which
says what to use instead. Functions and flags that are meaningful in exlm too (`cleanup_stfiles`,
`assert_paged_attn`, `has_…`) work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch

from ..config import RopeStyle as RopeStyle
from ..errors import Unsupported


class _UnavailableType(type):
    """The metaclass of placeholders: missing attributes and assignments raise errors with the remedy."""

    def __getattr__(cls, name: str) -> NoReturn:
        """An AttributeError, so that `hasattr` is false, with the remedy in it."""
        raise AttributeError(f"{cls.__name__}.{name} does not exist in exlm. {cls._find_remedy()}")

    def __setattr__(cls, name: str, value: object) -> None:
        """Refuse monkeypatches: a replaced method would never be called."""
        if not name.startswith("__"):
            raise Unsupported(f"{cls.__name__}.{name} cannot be exchanged: nothing calls it. {cls._find_remedy()}")
        super().__setattr__(name, value)

    def _find_remedy(cls) -> str:
        return next((str(vars(base)["remedy"]) for base in cls.__mro__ if "remedy" in vars(base)), "")


class Unavailable(metaclass=_UnavailableType):
    """A class without a counterpart: scripts may import it and use it in `isinstance`, but not create it."""

    remedy: ClassVar[str]

    def __init__(self, *arguments: object, **options: object) -> None:
        raise Unsupported(self.remedy)


def unavailable(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A function without a counterpart; calling it raises `Unsupported` with the remedy."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise Unsupported(f"{name} does not exist in exlm. {remedy}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"A function of exllamav2 without a counterpart. {remedy}"
    return refuse


class UnavailableObject:
    """An object or table without a counterpart; using it, or calling its functions, raises `Unsupported`."""

    def __init__(self, name: str, remedy: str) -> None:
        self._error = f"{name} does not exist in exlm. {remedy}"
        self._name, self._remedy = name, remedy

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """A function that refuses: scripts bind several functions before they call one."""
        if name.startswith("_"):
            raise AttributeError(name)
        return unavailable(f"{self._name}.{name}", self._remedy)

    def __repr__(self) -> str:
        """The error that a use raises."""
        return f"<{self._error}>"

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        raise Unsupported(self._error)

    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = _refuse


# Attention


class AttentionModule(Unavailable):
    """The attention of one layer."""

    remedy = (
        "Attention has no public module: it is bound to its kernels while the model loads. Use "
        "model.forward(ids, cache), or a generator."
    )

    class Params(Unavailable):
        """Arguments of a forward pass that every layer received."""

        remedy = "Attention parameters are not public: call model.forward(ids, cache, input_mask=…)."

    class PagedParams(Params):
        """Arguments of a forward pass with page tables."""

        remedy = "Page tables are not public: use ExLlamaV2DynamicGenerator, which owns them."


AttentionParams, PagedAttentionParams = AttentionModule.Params, AttentionModule.PagedParams

has_flash_attn = has_flash_attn_with_paged = has_flash_attn_with_window = has_flash_attn_with_softcap = True
"""Scripts test these to choose a generator; exlm has paging, windows and softcap on every device."""

has_xformers = has_lower_right_sdpa = False
"""exlm uses neither."""


def assert_paged_attn() -> None:
    """Do nothing: paged attention works on every device."""


# Other layers


class LayerModule(Unavailable):
    """The base class of all layers; scripts look for its subclasses in `model.modules`."""

    remedy = (
        "Layers have no public modules: they are bound to their kernels while the model loads. Use "
        "model.forward(ids, cache), or a generator; model.explain() says what runs each part."
    )


class Linear(LayerModule):
    """A linear layer."""


class MLP(LayerModule):
    """The MLP of one layer."""


class MoEMLP(LayerModule):
    """The router and experts of one layer."""


class ParallelDecoder(LayerModule):
    """A layer whose attention and MLP read the same input."""


class LinearAttention(LayerModule):
    """The attention of a DeciLM layer that is a single matrix."""


class EmbeddingModule(LayerModule):
    """The token embedding."""


class PositionEmbedding(LayerModule):
    """Learned position embeddings."""


class RMSNorm(LayerModule):
    """RMSNorm."""


class LayerNorm(LayerModule):
    """LayerNorm."""


class HeadNorm(LayerModule):
    """The norm of each query or key head."""


class Convolution(LayerModule):
    """The patch convolution of a vision tower."""


# Model description, files, devices, tensor parallelism


class ArchParams(Unavailable):
    """An architecture, read from config.json."""

    remedy = "A model is described by data: read config.arch, config.architecture and config.spec of exlm.Config."


ROPE_REMEDY = (
    "Rotations are made while a model loads: config.scale_pos_emb, scale_alpha_value, rotary_embedding_base "
    "and yarn_rope_factor of exlm.Config change them."
)
get_rope_params = unavailable("exllamav2.rope.get_rope_params", ROPE_REMEDY)
gen_mrope_embed = unavailable("exllamav2.mrope.gen_mrope_embed", ROPE_REMEDY)


class SafetensorsFile(Unavailable):
    """A safetensors file, read tensor by tensor."""

    remedy = (
        "Files are opened while a model loads: use exlm.Model, config.tensor_file_map for where each tensor "
        "is, and safetensors.safe_open for single tensors."
    )


def cleanup_stfiles() -> None:
    """Do nothing: no file stays open once a model is loaded."""


class DeviceContext(Unavailable):
    """Scratch memory and RoPE tables of one device."""

    remedy = "A model keeps no scratch memory to ask for: load it with exlm.Model; config.device chooses where."


class TPContext(Unavailable):
    """How the layers of a tensor-parallel model are split over devices."""

    remedy = (
        "Load with exlm.Model.load_tp(gpu_split) and make the cache with ExLlamaV2Cache_TP, which need "
        "nothing of it; model.tp_context says among how many ranks the model is shared."
    )


# The extension of compiled kernels

EXTENSION_REMEDY = (
    "Nothing is compiled and no kernel is called by hand: load a model with exlm.Model, which chooses its "
    "kernels; model.explain() names them."
)
exllamav2_ext = UnavailableObject("exllamav2_ext", EXTENSION_REMEDY)
make_c_ext = unavailable("exllamav2.ext.make_c_ext", EXTENSION_REMEDY)
make_group_map = unavailable("exllamav2.ext.make_group_map", EXTENSION_REMEDY)
make_q_matrix = unavailable("exllamav2.ext.make_q_matrix", EXTENSION_REMEDY)
make_q_matrix_split = unavailable("exllamav2.ext.make_q_matrix_split", EXTENSION_REMEDY)

none_tensor = torch.empty((1, 1), device="meta")
"""The argument that stood for "no tensor" in calls of the extension."""


# Tokenizers, drafts, servers


class SentencePieceVocabulary(Unavailable):
    """The reader of tokenizer.model."""

    remedy = (
        "A vocabulary is opened by ExLlamaV2Tokenizer(config), which finds its file: use its "
        "`tokenizer_model` attribute."
    )


class JsonVocabulary(Unavailable):
    """The reader of tokenizer.json."""

    remedy = SentencePieceVocabulary.remedy


class NgramCache(Unavailable):
    """The index of n-gram drafts."""

    remedy = "Drafts from n-grams are made inside: ExLlamaV2DynamicGenerator(…, use_ngram_draft=True)."


class NgramCacheNode(NgramCache):
    """An n-gram and the tokens that followed it."""


class WebSocketServer(Unavailable):
    """A server with a JSON protocol over web sockets."""

    remedy = (
        "This version has no web-socket server. `exlm serve` streams over HTTP, with the OpenAI API; or use "
        "ExLlamaV2DynamicGeneratorAsync in a server of your own."
    )


dispatch = unavailable(
    "exllamav2.server.websocket_actions.dispatch",
    "There is no web-socket server: `exlm serve` streams over HTTP, with the OpenAI API.",
)


# Images


class VisionTower(Unavailable):
    """A vision encoder; exlm runs only the language model of a multimodal checkpoint."""

    remedy = (
        "This version has no vision tower: it runs the language model of a multimodal folder. Compute image "
        "embeddings elsewhere and pass them as ExLlamaV2MMEmbedding(model, embeddings)."
    )


class MultimodalProjector(Unavailable):
    """The projection of image features into the language model's hidden states."""

    remedy = (
        "This version has no multimodal projector. Project image features elsewhere and pass the result as "
        "ExLlamaV2MMEmbedding(model, embeddings)."
    )


IMAGE_REMEDY = (
    "This version has no vision tower: compute image embeddings elsewhere and pass them as "
    "ExLlamaV2MMEmbedding(model, embeddings)."
)
convert_to_rgb = unavailable("exllamav2.vlm.util.convert_to_rgb", IMAGE_REMEDY)
normalize_image = unavailable("exllamav2.vlm.util.normalize_image", IMAGE_REMEDY)
size_to_longest_edge_and_patch_size = unavailable(
    "exllamav2.vlm.util.size_to_longest_edge_and_patch_size", IMAGE_REMEDY
)
smart_resize = unavailable("exllamav2.vlm.util.smart_resize", IMAGE_REMEDY)
preprocess = unavailable("exllamav2.vlm.processor.preprocess", IMAGE_REMEDY)
postprocess = unavailable("exllamav2.vlm.processor.postprocess", IMAGE_REMEDY)
position_embeddings = unavailable("exllamav2.vlm.processor.position_embeddings", IMAGE_REMEDY)


# The EXL2 converter

CONVERTER_REMEDY = (
    "Make EXL2 models with `exlm quantize`, or with exlm.quantize_model, where a measurement.json of the old "
    "converter works too; load them with exlm.Model."
)
tokenize = unavailable("exllamav2.conversion.tokenize.tokenize", CONVERTER_REMEDY)
get_standard_calibration = unavailable("exllamav2.conversion.tokenize.get_standard_calibration", CONVERTER_REMEDY)
embeddings = unavailable("exllamav2.conversion.measure.embeddings", CONVERTER_REMEDY)
measure_quant = unavailable("exllamav2.conversion.measure.measure_quant", CONVERTER_REMEDY)
optimize = unavailable("exllamav2.conversion.optimize.optimize", CONVERTER_REMEDY)
quant = unavailable("exllamav2.conversion.quantize.quant", CONVERTER_REMEDY)
compile_model = unavailable("exllamav2.conversion.compile.compile_model", CONVERTER_REMEDY)
print_stage = unavailable("exllamav2.conversion.bot_status.print_stage", CONVERTER_REMEDY)
get_qparams_reduced = unavailable("exllamav2.conversion.qparams.get_qparams_reduced", CONVERTER_REMEDY)
qparams_attn = UnavailableObject("exllamav2.conversion.qparams.qparams_attn", CONVERTER_REMEDY)
qparams_mlp = UnavailableObject("exllamav2.conversion.qparams.qparams_mlp", CONVERTER_REMEDY)
qparams_headoptions = UnavailableObject("exllamav2.conversion.qparams.qparams_headoptions", CONVERTER_REMEDY)


class QParams(Unavailable):
    """One choice of bit widths for a matrix."""

    remedy = CONVERTER_REMEDY


class AdaptiveGPTQ(Unavailable):
    """The GPTQ solver of one matrix."""

    remedy = CONVERTER_REMEDY
