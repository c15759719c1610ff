"""`Config`: the description in a model's folder or GGUF file, with the user's options, and `FrozenConfig`.

`Config(model_dir)` reads config.json and generation_config.json at once; its options may be changed until the
model loads. `freeze()` checks them and gives an immutable `FrozenConfig`, which the rest of exlm uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import env, families, spec
from .checkpoint import GgufFile, SafetensorsFolder
from .errors import ConfigError, InputError, ModelNotFound, report_unknown_attribute
from .families import ConfigReader
from .families.config_attributes import ConfigAttributes
from .families.config_reader import MAX_VOCAB
from .families.gguf import config_from_metadata
from .families.overrides import Overrides, apply_overrides, primary_rope
from .formats.quantization_config import QuantizationConfig
from .memory import memory_errors

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
    stored_dtype: str | None
    quantization: QuantizationConfig | None = None


class Config(ConfigAttributes):
    """The description of a model, with the user's options."""

    def __init__(self, model_dir: str | Path | None = None) -> None:
        switches = env.legacy_switches()
        self.model_dir: str | None = None if model_dir is None else str(model_dir)
        self.device: str | None = env.default_device()  # None: the first GPU, else the CPU
        self.dtype: str | None = None  # None: chosen by device
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
        rope = primary_rope(self._spec)
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
        if self.load_in_q4:
            raise InputError("config.load_in_q4 is not supported: quantise the model to a real 4-bit format instead.")
        overrides = Overrides(
            max_seq_len=self.max_seq_len,
            scale_pos_emb=self.scale_pos_emb or 1.0,  # old programs say None, or 0, for no scaling
            scale_alpha=self.scale_alpha_value or 1.0,
            rope_theta=self.rotary_embedding_base,
            yarn_factor=self.yarn_rope_factor,
            yarn_original=self.yarn_rope_original_max_position_embeddings,
            active_experts=self.num_experts_per_token,
        )
        quantization = self._read_quantization()
        is_quantized = quantization is not None or "quantization_config" in self._config_json
        return FrozenConfig(
            path=self._resolve_path(),
            spec=apply_overrides(self.spec, overrides),
            max_seq_len=self.max_seq_len,
            max_batch_size=self.max_batch_size,
            max_input_len=self.max_input_len,
            max_output_len=self.max_output_len,
            max_attention_size=self.max_attention_size,
            device=None if self.device is None else str(self.device),  # a torch.device or torch.dtype is accepted
            dtype=None if self.dtype is None else str(self.dtype),
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
    def _config_reader(self) -> ConfigReader:
        return ConfigReader(self._config_json)

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
            return _model_path(Path(self.model_dir).expanduser())
        except ModelNotFound:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of an unknown user
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelNotFound(f"{self.model_dir} cannot be looked at ({reason}).") from error


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
