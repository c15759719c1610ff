"""`ConfigReader`: typed values from config.json, under any of their keys, nested or flat, with checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import ConfigError, shown

REQUIRED: Final = object()
"""In place of a default: the key must be present."""

MAX_SIZE = 2**31
"""No size in a model description reaches this; a larger one is a damaged or hostile file."""

MAX_LAYERS = 4096
MAX_HEADS = 2**14
MAX_HEAD_DIM = 2**16
MAX_EXPERTS = 4096
"""Of one layer; the largest published model has 2,048."""

MAX_TOTAL_EXPERTS = 2**17
"""Of all layers together: each expert is three matrices, which are listed before any file is opened."""

MAX_VOCAB = 2**22
"""Rows of the embedding. Lookup tables of the tokenizer have an entry for each; 2**18 is common."""

MAX_CONV_KERNEL = 256
"""Of a causal convolution, which is summed tap by tap; published models have 3 or 4."""

MAX_STATE = 2**26
"""Numbers of one layer's recurrent state; published models have up to 2**20."""

SIZE_LIMITS: Mapping[str, int] = {
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head"), MAX_HEADS),
    **dict.fromkeys(("num_key_value_heads", "attn_config.kv_n_heads"), MAX_HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), MAX_HEADS),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_attn_config.num_heads"), MAX_HEADS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "mamba_head_dim", "mamba_d_head"), MAX_HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), MAX_HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), MAX_HEAD_DIM),
    "linear_attn_config.head_dim": MAX_HEAD_DIM,
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache"), MAX_CONV_KERNEL),
    "linear_attn_config.short_conv_kernel_size": MAX_CONV_KERNEL,
    **dict.fromkeys(("num_local_experts", "num_experts", "ffn_config.moe_num_experts"), MAX_EXPERTS),
    "n_routed_experts": MAX_EXPERTS,
    "vocab_size": MAX_VOCAB,
}
"""Limits of sizes by which lists or memory grow before any weight confirms them."""


def is_finite_number(value: object) -> bool:
    """Whether a value from a file is a number that float32 can hold; a whole number may have any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


class ConfigReader:
    """Typed look-ups in config.json: the first key that is not null wins, `text_config` before the top."""

    def __init__(
        self, raw: Mapping[str, Any], source: str = "config.json", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        self._defaults = dict(defaults or {})
        self._config = raw
        text_config = raw.get("text_config")
        if text_config is not None and not isinstance(text_config, Mapping):
            raise ConfigError(f"{source}: text_config must be an object, found {type(text_config).__name__}.")
        self._text_config: Mapping[str, Any] = text_config or {}

    def with_missing_keys_filled(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """A reader with missing keys of `text_config` added, or of the top level if there is no `text_config`.

        Unlike with `with_defaults`, a key that is null stays null: null can mean that a feature is off.
        """
        if not self._text_config:
            return ConfigReader({**defaults, **self._config}, self.source, self._defaults)
        return ConfigReader(
            {**self._config, "text_config": {**defaults, **self._text_config}}, self.source, self._defaults
        )

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """A reader with the family's defaults for keys that the file leaves out or has as null."""
        return ConfigReader(self._config, self.source, {**self._defaults, **defaults})

    @property
    def architecture(self) -> str:
        """The one name in `architectures`."""
        names = self._config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(
                f'{self.source}: "architectures" must be a list of exactly one name, found {shown(names)}. '
                "Without it the model's family is unknown; take config.json from the model's own page."
            )
        return names[0]

    def find(self, *keys: str) -> tuple[str, Any]:
        """The first key that is not null, and its value; a dot in a key reaches into a nested object."""
        for key in keys:
            for table in (self._text_config, self._config):
                value: Any = table
                for part in key.split("."):
                    value = value.get(part) if isinstance(value, Mapping) else None
                if value is not None:
                    return key, value
        return next(((key, self._defaults[key]) for key in keys if key in self._defaults), (keys[0], None))

    def get(self, *keys: str) -> Any:
        """The value as the file has it, or None."""
        return self.find(*keys)[1]

    def nested(self, *keys: str) -> Mapping[str, Any]:
        """A nested object; empty when absent."""
        key, value = self.find(*keys)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid_value(key, "an object", value)
        return value or {}

    def integer(self, *keys: str, default: Any = REQUIRED) -> Any:
        """A whole number; 4096.0 counts as one. The result is typed by its default: int, or int | None."""
        key, value = self._find_or_default(keys, default)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid_value(key, "a whole number", value)
        return value

    def size(self, *keys: str, default: Any = REQUIRED) -> int:
        """A whole number of at least one, and no larger than `SIZE_LIMITS` allows."""
        key, _ = self.find(*keys)
        value = self.integer(*keys, default=default)
        most = SIZE_LIMITS.get(key, MAX_SIZE - 1)
        if not isinstance(value, int) or not 0 < value <= most:
            raise self.invalid_value(key, f"a size from 1 to {most}", value)
        return value

    def real(self, *keys: str, default: Any = REQUIRED) -> Any:
        """A finite number, as a float; typed by its default like `integer`."""
        key, value = self._find_or_default(keys, default)
        if value is None:
            return None
        if not is_finite_number(value):
            raise self.invalid_value(key, "a finite number", value)
        return float(value)

    def positive(self, *keys: str, default: Any = REQUIRED) -> Any:
        """A finite number above zero."""
        value = self.real(*keys, default=default)
        if value is not None and not value > 0:
            raise self.invalid_value(self.find(*keys)[0], "a number above 0", value)
        return value

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false."""
        key, value = self._find_or_default(keys, default)
        if not isinstance(value, bool):
            raise self.invalid_value(key, "true or false", value)
        return value

    def top_level_flag(self, key: str, default: bool) -> bool:
        """True or false, read from the top level before `text_config`."""
        value = self._config.get(key)
        if value is None:
            return self.flag(key, default=default)
        if not isinstance(value, bool):
            raise self.invalid_value(key, "true or false", value)
        return value

    def text(self, *keys: str, default: Any = REQUIRED) -> Any:
        """A string; typed by its default like `integer`."""
        key, value = self._find_or_default(keys, default)
        if value is not None and not isinstance(value, str):
            raise self.invalid_value(key, "a string", value)
        return value

    def num_layers(self) -> int:
        """The number of layers."""
        count = self.size("num_hidden_layers", "n_layers", "n_layer", "num_layers")
        if count > MAX_LAYERS:
            raise self.invalid_value("num_hidden_layers", f"at most {MAX_LAYERS} layers", count)
        return count

    def invalid_value(self, key: str, expected: str, found: object) -> ConfigError:
        """The error for an impossible value."""
        return ConfigError(f'{self.source}: "{key}" must be {expected}, found {shown(found)}.')

    def inconsistent(self, problem: str) -> ConfigError:
        """The error for values that contradict each other."""
        return ConfigError(f"{self.source}: {problem}. Take config.json from the model's own page.")

    def _find_or_default(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        key, value = self.find(*keys)
        if value is not None:
            return key, value
        if default is REQUIRED:
            also = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise ConfigError(
                f'{self.source} has no "{keys[0]}"{also}, which {self._config.get("architectures")} needs. '
                "The file is incomplete: take it from the model's own page."
            )
        return key, default
