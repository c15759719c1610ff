"""`Config`: the description in a model's folder or GGUF file, with the user's options, and `FrozenConfig`.

`Config(model_dir)` reads config.json and generation_config.json at once; its options may be changed until the
model loads. `freeze()` checks them and gives an immutable `FrozenConfig`, which the rest of exlm uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from . import env, families, spec
from .checkpoint import Checkpoint, GgufCheckpoint, GgufFile, SafetensorsCheckpoint, SafetensorsFolder
from .errors import ConfigError, ExlmError, InputError, ModelNotFound, report_unknown_attribute, shown
from .families import ConfigReader
from .families.config_reader import MAX_SIZE, MAX_VOCAB
from .families.gguf import config_from_metadata
from .formats.quantization_config import QuantizationConfig
from .memory import memory_errors
from .spec import Attention, Mlp, Moe, RopeScaling

DEFAULT_CHUNK_SIZE = 2048
"""Default size of a prefill chunk in tokens."""

IGNORED_OPTIONS = ("max_attn_size", "no_flash_attn_cross")
"""Names that programs set by mistake; exllamav2 had no such options either. They are kept and ignored."""

MAX_JSON_BYTES = 32 * 2**20
"""A larger JSON file is refused instead of parsed."""


@dataclass(frozen=True)
class FrozenConfig:
    """Everything a model needs to load and run, checked and immutable."""

    path: Path  # a folder, or a GGUF file
    spec: spec.Model
    max_seq_len: int
    max_batch_size: int
    max_input_len: int
    max_output_len: int | None
    max_attention_size: int
    device: str | None
    dtype: str | None
    cpu_activation_bits: Literal[16, 8]
    stored_dtype: str | None
    quantization: QuantizationConfig | None = None

    def open_checkpoint(self) -> Checkpoint:
        """The weights by role; only headers are read."""
        if self.path.is_file():
            return GgufCheckpoint(self.path)
        return SafetensorsCheckpoint(self.path, self.spec.names, self.quantization)


class RopeStyle(IntEnum):
    """Which dimensions of a head rotate as a pair: none, neighbours, or those half a head apart."""

    NONE = 0
    GPTJ = 1
    NEOX = 2


@dataclass(frozen=True)
class LanguageModelParams:
    """`config.arch.lm`: the parameters of the language model."""

    requires_bos: bool  # a prompt without BOS gives nonsense
    is_moe: bool
    norm: str  # "rmsnorm" or "layernorm"
    rope_style: RopeStyle
    mlp_gate: bool
    mlp_act_func: str
    parallel_decoder_blocks: bool  # attention and MLP read the same input
    swa: bool  # every layer has a sliding window
    alternating_swa: bool  # some layers have a sliding window, others have none
    residual_stream_fp32: bool
    mrope: bool  # positions in three planes


@dataclass(frozen=True)
class ArchParams:
    """`config.arch`."""

    arch_string: str
    lm: LanguageModelParams

    @property
    def requires_bos(self) -> bool:
        """`lm.requires_bos`, under the name that exllamav2 had in 2024."""
        return self.lm.requires_bos


class Config:
    """The description of a model, with the user's options.

    What the model is, under the names that exllamav2 and config.json use, is read-only; an attribute that differs by
    layer is the first layer's, unless it says else.
    """

    def __init__(self, model_dir: str | Path | None = None) -> None:
        switches = env.legacy_switches()
        self.model_dir: str | None = None if model_dir is None else str(model_dir)
        self.device: str | None = env.default_device()  # None: the first GPU, else the CPU
        self.dtype: str | None = None  # None: chosen by device
        self.cpu_activation_bits = 16  # of products with quantised weights on a CPU; 8: faster prompts, less exact
        self.max_seq_len = 2048
        self.max_batch_size = 1
        self.max_input_len = DEFAULT_CHUNK_SIZE
        self.max_attention_size = DEFAULT_CHUNK_SIZE**2
        self.max_output_len: int | None = None
        self.scale_pos_emb: float | None = 1.0  # None, too: no scaling
        self.scale_alpha_value: float | None = 1.0
        self.rotary_embedding_base: float | None = None
        self.yarn_rope_factor: float | None = None
        self.yarn_rope_original_max_position_embeddings: int | None = None
        self.num_experts_per_token: int | None = None
        self.no_flash_attn = switches.no_flash_attn
        self.no_xformers = switches.no_xformers
        self.no_sdpa = switches.no_sdpa
        self.no_graphs = switches.no_graphs
        self.fasttensors = False
        self.load_in_q4 = False
        self.max_dq_size = 512 * 2**20
        self._config_json: Mapping[str, Any] = {}
        self._spec: spec.Model | None = None
        self._gguf_file: GgufFile | None = None  # kept open, so that its header is not parsed again
        self._generation_json: Mapping[str, Any] = {}
        self._tensor_file_map: Mapping[str, str] | None = None  # cached `tensor_file_map`
        self._options = frozenset(name for name in self.__dict__ if name[0] != "_")
        if model_dir is not None:
            self.prepare()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a known option; a misspelt one is an error: ignoring it would hide the mistake."""
        if not name.startswith("_") and "_options" in self.__dict__ and name not in self.__dict__:
            if isinstance(getattr(type(self), name, None), property):
                raise AttributeError(f"config.{name} says what the model is: it cannot be set.")
            report_unknown_attribute("Config has no option", name, self._options, IGNORED_OPTIONS)
        super().__setattr__(name, value)

    def prepare(self, no_tensors: bool = False) -> None:
        """Read the folder (again); its context length and RoPE settings replace earlier changes.

        `no_tensors` is accepted for old scripts: weights are never read here.
        """
        self._resolve_path()  # an error names the path as the user wrote it
        # Absolute, since a program may change its working directory before it loads the model.
        self.model_dir = str(Path(self.model_dir or "").expanduser().absolute())
        path = self._resolve_path()
        self._gguf_file = self._tensor_file_map = None
        with memory_errors(lambda: f"{path}: the model's description could not be read"):
            if path.is_file():
                self._read_gguf(path)
            else:
                self._read_folder(path)
        assert self._spec is not None
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            _check_ids(path / "config.json", key, ConfigReader(self._config_json).get(key))
        _check_ids(path / "generation_config.json", "eos_token_id", self._generation_json.get("eos_token_id"))
        self.max_seq_len = self._spec.max_positions
        rope = self._spec.primary_rope
        linear = rope.scaling if rope is not None and isinstance(rope.scaling, spec.LinearScaling) else None
        self.scale_pos_emb = linear.factor if linear else 1.0
        self.scale_alpha_value = 1.0
        self.rotary_embedding_base = rope.theta if rope is not None else None
        experts = [layer.mlp.active for layer in self._spec.layers if isinstance(layer.mlp, spec.Moe)]
        self.num_experts_per_token = experts[0] if experts else None

    def _read_folder(self, folder: Path) -> None:
        self._config_json = read_json(folder / "config.json")
        self._spec = families.build_spec(ConfigReader(self._config_json, str(folder / "config.json")))
        generation = folder / "generation_config.json"
        self._generation_json = read_json(generation) if generation.is_file() else {}

    def _read_gguf(self, path: Path) -> None:
        file = GgufFile(path)
        self._config_json = config_from_metadata(
            file.metadata, str(path), tensors=file.tensors, factors=file.rope_factors()
        )
        self._spec = families.build_spec(ConfigReader(self._config_json, str(path)))
        self._generation_json = {}
        file.close()
        self._gguf_file = file

    def freeze(self) -> FrozenConfig:
        """The description with the user's options checked and applied."""
        for name in ("max_seq_len", "max_batch_size", "max_input_len", "max_attention_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"config.{name} must be a whole number of at least 1, found {value!r}.")
        if self.max_output_len is not None and self.max_output_len < 1:
            raise InputError(f"config.max_output_len must be at least 1, or None; found {self.max_output_len!r}.")
        if self.cpu_activation_bits not in (8, 16):
            raise InputError(f"config.cpu_activation_bits must be 16 or 8, found {self.cpu_activation_bits!r}.")
        if self.load_in_q4:
            raise InputError("config.load_in_q4 is not supported: quantise the model to a real 4-bit format instead.")
        quantization = self._read_quantization()
        is_quantized = quantization is not None or "quantization_config" in self._config_json
        return FrozenConfig(
            path=self._resolve_path(),
            spec=_spec_with_options(self),
            max_seq_len=self.max_seq_len,
            max_batch_size=self.max_batch_size,
            max_input_len=self.max_input_len,
            max_output_len=self.max_output_len,
            max_attention_size=self.max_attention_size,
            device=None if self.device is None else str(self.device),  # a torch.device or torch.dtype is accepted
            dtype=None if self.dtype is None else str(self.dtype),
            cpu_activation_bits=8 if self.cpu_activation_bits == 8 else 16,
            stored_dtype=None if is_quantized else self.stored_dtype,  # packed weights are float16
            quantization=quantization,
        )

    def set_low_mem(self) -> None:
        """Use smaller prefill chunks: less scratch memory, slower prompts."""
        self.max_input_len = 1024
        self.max_attention_size = 1024**2
        if self.max_output_len is not None:
            self.max_output_len = min(self.max_output_len, 1024)

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Does nothing; accepted for old scripts. Every backend supports sliding windows and softcaps."""

    @property
    def spec(self) -> spec.Model:
        """The model that config.json describes, without the user's options."""
        if self._spec is None:
            raise ConfigError("No model has been read: give Config a folder, or set model_dir and call prepare().")
        return self._spec

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """A GGUF file's metadata, which holds its tokenizer too; None for a folder."""
        return None if self._gguf_file is None else self._gguf_file.metadata

    @property
    def stored_dtype(self) -> str | None:
        """The dtype that config.json declares, as `dtype` or `torch_dtype`."""
        value = ConfigReader(self._config_json).get("dtype", "torch_dtype")
        return value.removeprefix("torch.") if isinstance(value, str) else None

    @property
    def vision_model_type(self) -> str | None:
        """The `model_type` of the vision tower, None without one."""
        vision = self._config_json.get("vision_config")
        return str(vision.get("model_type", "unknown")) if isinstance(vision, Mapping) else None

    @property
    def generation_config(self) -> dict[str, Any]:
        """The EOS ids of generation_config.json."""
        return {"eos_token_id": _id_list(self._generation_json.get("eos_token_id")) or None}

    @property
    def bos_token_id(self) -> int | None:
        """The BOS id."""
        return _first(self._token_ids("bos_token_id"))

    @property
    def eos_token_id(self) -> int | None:
        """The first EOS id; `eos_token_ids` has all of them."""
        return _first(self._token_ids("eos_token_id"))

    @property
    def eos_token_ids(self) -> list[int]:
        """Every EOS id: config.json's first, then generation_config.json's."""
        return list(
            dict.fromkeys([*self._token_ids("eos_token_id"), *_id_list(self._generation_json.get("eos_token_id"))])
        )

    @property
    def pad_token_id(self) -> int | None:
        """The id that pads shorter rows of a batch."""
        return _first(self._token_ids("pad_token_id"))

    @property
    def model_config(self) -> str:
        """The file that the description was read from: config.json, or the GGUF file itself."""
        path = self._resolve_path()
        return str(path if path.is_file() else path / "config.json")

    @property
    def tensor_files(self) -> list[str]:
        """The files of weights, by name."""
        return list(dict.fromkeys(sorted(self.tensor_file_map.values())))

    @property
    def tensor_file_map(self) -> Mapping[str, str]:
        """Each stored tensor's file, from headers alone; in a folder under Llama's spelling of its name.

        Read-only: layers cannot be exchanged by pointing their names to other files.
        """
        if self._tensor_file_map is None:
            names, path = self.spec.names, self._resolve_path()
            if self._gguf_file is not None:
                found = {name: str(entry.file) for name, entry in self._gguf_file.tensors.items()}
            else:
                files = SafetensorsFolder(path)
                found = {names.to_llama_key(name): str(info.file) for name, info in files.tensors.items()}
            self._tensor_file_map = MappingProxyType(found)
        return self._tensor_file_map

    @property
    def architecture(self) -> str:
        """The architecture that config.json names."""
        return self.spec.architecture

    @property
    def arch(self) -> ArchParams:
        """Parameters of the architecture, such as `config.arch.lm.requires_bos`."""
        model, first = self.spec, self.spec.layers[0]
        rope, windows = model.primary_rope, [attn.window is not None for attn in model.attentions]
        styles = {"gptj": RopeStyle.GPTJ, "neox": RopeStyle.NEOX}
        return ArchParams(
            model.architecture,
            LanguageModelParams(
                requires_bos=model.requires_bos,
                is_moe=self.num_experts is not None,
                norm="rmsnorm" if model.final_norm.kind == "rms" else "layernorm",
                rope_style=RopeStyle.NONE if rope is None else styles[rope.style],
                mlp_gate=self._mlp.gated,
                mlp_act_func=self._mlp.act,
                parallel_decoder_blocks=first.parallel,
                swa=bool(windows) and all(windows),
                alternating_swa=any(windows) and not all(windows),
                residual_stream_fp32=model.fp32_residual,
                mrope=self.mrope_section is not None,
            ),
        )

    # Sizes

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: rows of the embedding."""
        return self.spec.vocab

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.spec.hidden

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the model."""
        return len(self.spec.layers)

    @property
    def _attention(self) -> Attention:
        """The attention of the first layer that has one; of a model without any, one without heads."""
        return next(iter(self.spec.attentions), Attention(0, 0, 0, None, 1.0))

    @property
    def num_attention_heads(self) -> int:
        """Query heads of a layer."""
        return self._attention.heads

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads of a layer."""
        return self._attention.kv_heads

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_attention_heads // max(1, self.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self._attention.head_dim

    @property
    def _mlp(self) -> Mlp | Moe:
        """The MLP of the first layer that has one."""
        return next(layer.mlp for layer in self.spec.layers if layer.mlp is not None)

    @property
    def intermediate_size(self) -> int:
        """Intermediate size of the first MLP, or of one of its experts."""
        return self._mlp.width

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer that has some; None where no layer has. `num_experts_per_token` is an option."""
        experts = [layer.mlp.experts for layer in self.spec.layers if isinstance(layer.mlp, spec.Moe)]
        return experts[0] if experts else None

    # Norms, scores, scales

    @property
    def norm_eps(self) -> float:
        """What norms add to the variance."""
        return self.spec.final_norm.eps

    @property
    def use_qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return self._attention.qk_norm is not None

    @property
    def attn_logit_softcapping(self) -> float | None:
        """The softcap of attention scores; None without one."""
        return self._attention.softcap

    @property
    def final_logit_softcapping(self) -> float | None:
        """The softcap of logits; None without one."""
        return self.spec.head.softcap

    @property
    def logit_scale(self) -> float:
        """Factor of the logits."""
        return self.spec.head.scale

    @property
    def scale_emb(self) -> float:
        """Factor of the embeddings."""
        return self.spec.embed.scale

    @property
    def scale_depth(self) -> float:
        """Factor of the outputs of attention and MLP before they are added."""
        return self.spec.layers[0].residual_scale

    @property
    def norm_head(self) -> int | None:
        """1 if the rows of the head are normalised."""
        return 1 if self.spec.head.normalize_rows else None

    @property
    def query_pre_attn_scalar(self) -> float | None:
        """`query_pre_attn_scalar` of config.json; attention scores are divided by its square root."""
        return self._real("query_pre_attn_scalar", None)

    @property
    def attention_multiplier(self) -> float | None:
        """`attention_multiplier` of config.json, the factor of attention scores."""
        return self._real("attention_multiplier", None)

    @property
    def initializer_range(self) -> float | None:
        """`initializer_range` of config.json, which only training uses."""
        return self._real("initializer_range", 0.02)

    # Windows and positions

    @property
    def sliding_window(self) -> int:
        """Sliding window in tokens; 0 if no layer has one."""
        return max((attn.window or 0 for attn in self.spec.attentions), default=0)

    @property
    def sliding_window_pattern(self) -> int:
        """n if exactly every n-th layer has full attention and the others a window; 1 without such a pattern."""
        full_attention = [
            i + 1
            for i, layer in enumerate(self.spec.layers)
            if layer.attention is None or layer.attention.window is None
        ]
        if not full_attention or not self.sliding_window:
            return 1
        period = full_attention[0]
        return period if full_attention == list(range(period, self.num_hidden_layers + 1, period)) else 1

    @property
    def original_max_seq_len(self) -> int:
        """The context length of LongRoPE's short factors, else the trained length."""
        scaling = self._scaling
        return scaling.original_max_positions if isinstance(scaling, spec.LongRopeScaling) else self.spec.max_positions

    @property
    def alt_rope_method(self) -> str | None:
        """The RoPE scaling: "su" (LongRoPE), "yarn", "llama3", or None for any other."""
        named = {spec.LongRopeScaling: "su", spec.YarnScaling: "yarn", spec.Llama3Scaling: "llama3"}
        return named.get(type(self._scaling))

    @property
    def scale_short_factor(self) -> list[float] | None:
        """LongRoPE's factors up to `original_max_seq_len`."""
        return list(scaling.short_factors) if isinstance(scaling := self._scaling, spec.LongRopeScaling) else None

    @property
    def scale_long_factor(self) -> list[float] | None:
        """LongRoPE's factors beyond it."""
        return list(scaling.long_factors) if isinstance(scaling := self._scaling, spec.LongRopeScaling) else None

    @property
    def l3_rope_factor(self) -> float | None:
        """Llama 3's divisor of low frequencies."""
        return scaling.factor if isinstance(scaling := self._scaling, spec.Llama3Scaling) else None

    @property
    def l3_rope_low_freq_factor(self) -> float | None:
        """`low_freq_factor` of Llama 3's RoPE scaling."""
        return scaling.low_freq_factor if isinstance(scaling := self._scaling, spec.Llama3Scaling) else None

    @property
    def l3_rope_high_freq_factor(self) -> float | None:
        """`high_freq_factor` of Llama 3's RoPE scaling."""
        return scaling.high_freq_factor if isinstance(scaling := self._scaling, spec.Llama3Scaling) else None

    @property
    def l3_rope_original_max_position_embeddings(self) -> int | None:
        """The context length before scaling."""
        return scaling.original_max_positions if isinstance(scaling := self._scaling, spec.Llama3Scaling) else None

    @property
    def mrope_section(self) -> list[int] | None:
        """Frequencies of each plane of positions (time, height, width)."""
        rope = self.spec.primary_rope
        return list(rope.mrope_sections) if rope is not None and rope.mrope_sections else None

    @property
    def _scaling(self) -> RopeScaling | None:
        rope = self.spec.primary_rope
        return None if rope is None else rope.scaling

    @property
    def _config_reader(self) -> ConfigReader:
        return ConfigReader(self._config_json)

    def _real(self, key: str, default: float | None) -> float | None:
        found: float | None = self._config_reader.real(key, default=default)
        return found

    def _read_quantization(self) -> QuantizationConfig | None:
        """The GPTQ or AWQ configuration in config.json, or in the file that older versions wrote for it."""
        folder = self._resolve_path()
        raw, source = (self._config_json.get("quantization_config"), f"{folder / 'config.json'}: quantization_config")
        gptq, awq = folder / "quantize_config.json", folder / "quant_config.json"
        if raw is None and gptq.is_file():
            raw, source = read_json(gptq), str(gptq)
        if raw is None and awq.is_file() and "w_bit" in (awq_config := read_json(awq)):
            raw, source = awq_config, str(awq)  # by AutoAWQ; other programs use the name too
        if not isinstance(raw, Mapping) or raw.get("quant_method") == "exl2":
            return None
        return QuantizationConfig.from_json(raw, source)

    def _token_ids(self, key: str) -> list[int]:
        return _id_list(ConfigReader(self._config_json).get(key))

    def _resolve_path(self) -> Path:
        """The model's folder or GGUF file, if there is one."""
        if not self.model_dir:
            raise ConfigError("No model_dir specified: Config('/path/to/model'), or set config.model_dir.")
        try:
            with memory_errors(lambda: f"{self.model_dir} could not be looked at"):
                return _model_path(Path(self.model_dir).expanduser())
        except ExlmError:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of an unknown user
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelNotFound(f"{self.model_dir} cannot be looked at ({reason}).") from error


def _spec_with_options(config: Config) -> spec.Model:
    """The model with the user's context length, RoPE and active experts; InputError if one is impossible."""
    model, active = config.spec, config.num_experts_per_token
    if (limit := model.embed.learned_positions) and config.max_seq_len > limit:
        raise InputError(
            f"max_seq_len {config.max_seq_len} exceeds the {limit} learned positions of the model, "
            f"which cannot be stretched. Use at most {limit}."
        )
    old = model.primary_rope
    new = None if old is None else _rope_with_options(config, old)
    # Old programs say None, or 0, for no scaling.
    scalings = config.scale_pos_emb or 1.0, config.scale_alpha_value or 1.0
    if new is None and (scalings != (1.0, 1.0) or config.yarn_rope_factor):
        raise InputError(f"{model.architecture} has no rotary positions to scale.")

    def change(layer: spec.Layer) -> spec.Layer:
        if new is not None and layer.attention is not None and layer.attention.rope == old:
            layer = layer.with_attention(lambda attn: replace(attn, rope=new))
        if isinstance(layer.mlp, spec.Moe) and active is not None:
            if not 1 <= active <= layer.mlp.experts:
                raise InputError(f"num_experts_per_token must be 1 to {layer.mlp.experts}, found {active}.")
            layer = replace(layer, mlp=replace(layer.mlp, active=active))
        return layer

    return replace(model, layers=tuple(change(layer) for layer in model.layers))


def _rope_with_options(config: Config, rope: spec.Rope) -> spec.Rope:
    theta = rope.theta if config.rotary_embedding_base is None else config.rotary_embedding_base
    linear_factor, ntk_alpha = config.scale_pos_emb or 1.0, config.scale_alpha_value or 1.0
    for name, value, most in (
        ("scale_pos_emb", linear_factor, 1e6),
        ("scale_alpha_value", ntk_alpha, 1e6),
        ("rotary_embedding_base", theta, 1e38),
    ):
        if not isinstance(value, int | float) or not 0 < value < most:
            raise InputError(f"config.{name} must be a number above 0, found {shown(value)}.")
    scaling = rope.scaling
    if isinstance(scaling, spec.LinearScaling):
        scaling = None  # its factor is the initial value of scale_pos_emb
    if config.yarn_rope_factor is not None:
        scaling = _yarn_scaling(config, scaling)
    return replace(rope, theta=theta, scaling=scaling, ntk_alpha=ntk_alpha, linear_factor=float(linear_factor))


def _yarn_scaling(config: Config, current: spec.RopeScaling | None) -> spec.YarnScaling:
    factor = config.yarn_rope_factor
    if not isinstance(factor, int | float) or not 1 <= factor < 1e9:
        raise InputError(f"config.yarn_rope_factor must be at least 1 and below 1e9, found {shown(factor)}.")
    known = current.original_max_positions if isinstance(current, spec.YarnScaling) else config.spec.max_positions
    original = config.yarn_rope_original_max_position_embeddings or known
    if not isinstance(original, int | float) or not 1 <= original < MAX_SIZE:
        raise InputError(
            "config.yarn_rope_original_max_position_embeddings must be a length from 1 to "
            f"{MAX_SIZE - 1}, found {shown(original)}."
        )
    return spec.YarnScaling.with_defaults(float(factor), int(original))


def _model_path(path: Path) -> Path:
    if not path.exists():
        raise ModelNotFound(f"Can't find {path}: no such file or folder.")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{path} is a file, and only a .gguf file is a model by itself.")
        return path
    # A folder may have a config.json of a line or two beside a GGUF file, whose metadata says more.
    has_gguf_only = any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path if (path / "config.json").is_file() and not has_gguf_only else _single_gguf(path)


def _single_gguf(folder: Path) -> Path:
    """The GGUF model in a folder without config.json; of a split one, its first file."""
    found = sorted(p for p in folder.glob("*.gguf") if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found[:6])
        raise ModelNotFound(f"{folder} holds {len(found)} GGUF models ({names}): name one of them.")
    listing = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
    raise ModelNotFound(f"Can't find {folder / 'config.json'}: not a model folder (it holds {listing}).")


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file of reasonable size."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {size} bytes; a configuration has at most {MAX_JSON_BYTES}.")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value


def _id_list(value: object) -> list[int]:
    """One id or a list of them, as a list; some files write -1 where there is none."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and item >= 0]


def _check_ids(path: Path, key: str, value: object) -> None:
    """Refuse an id that is larger than any vocabulary: one beyond 64 bits would fit no tensor."""
    if odd := [number for number in _id_list(value) if number >= MAX_VOCAB]:
        raise ConfigError(f'{path}: "{key}" must be below {MAX_VOCAB:,}, found {odd[0]!r:.80}.')


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None
