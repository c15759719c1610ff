"""The read-only attributes of `Config`: facts of the spec under the names that exllamav2 and config.json use.

Programs read them; what a program may change is an option of `Config`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum

from .. import spec
from ..spec import Attention, Mlp, Moe, RopeScaling
from .config_reader import ConfigReader
from .overrides import primary_rope


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


class ConfigAttributes:
    """Read-only attributes of a model; an attribute that differs by layer is the first layer's, unless it says else."""

    @property
    @abstractmethod
    def spec(self) -> spec.Model: ...

    @property
    @abstractmethod
    def _config_reader(self) -> ConfigReader:
        """config.json, for keys that the description does not have."""

    @property
    def architecture(self) -> str:
        return self.spec.architecture

    @property
    def arch(self) -> ArchParams:
        """Parameters of the architecture, such as `config.arch.lm.requires_bos`."""
        model, first = self.spec, self.spec.layers[0]
        rope, windows = primary_rope(model), [attn.window is not None for attn in model.attentions]
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
        return self.spec.hidden

    @property
    def num_hidden_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def _attention(self) -> Attention:
        """The attention of the first layer that has one; of a model without any, one without heads."""
        return next(iter(self.spec.attentions), Attention(0, 0, 0, None, 1.0))

    @property
    def num_attention_heads(self) -> int:
        return self._attention.heads

    @property
    def num_key_value_heads(self) -> int:
        return self._attention.kv_heads

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_attention_heads // max(1, self.num_key_value_heads)

    @property
    def head_dim(self) -> int:
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
        return self.spec.final_norm.eps

    @property
    def use_qk_norm(self) -> bool:
        return self._attention.qk_norm is not None

    @property
    def attn_logit_softcapping(self) -> float | None:
        return self._attention.softcap

    @property
    def final_logit_softcapping(self) -> float | None:
        return self.spec.head.softcap

    @property
    def logit_scale(self) -> float:
        return self.spec.head.scale

    @property
    def scale_emb(self) -> float:
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
        rope = primary_rope(self.spec)
        return list(rope.mrope_sections) if rope is not None and rope.mrope_sections else None

    @property
    def _scaling(self) -> RopeScaling | None:
        rope = primary_rope(self.spec)
        return None if rope is None else rope.scaling

    def _real(self, key: str, default: float | None) -> float | None:
        found: float | None = self._config_reader.real(key, default=default)
        return found
