"""A PEFT adapter's files: its configuration, its tensors, and the model matrices that its module names mean.

The reader checks both files against the model and refuses what it cannot apply.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..checkpoint.safetensors_files import DTYPES, FLOAT_TYPES, SafetensorsHeader, read_header
from ..checkpoint.tensor_files import TensorInfo, damaged, quoted, read_small_file
from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from ..spec.model import Matrix, matrices
from ..spec.tensor_names import RowRange

MAX_CONFIG_BYTES = 32 * 2**20

MAX_PATTERN_COST = 4_000_000
"""Limit of the summed costs of a table's patterns; a pattern costs 100 ** (its number of repetition operators)."""

MERGE_ADVICE = "Merge it into the model with PEFT (merge_and_unload), save that, and load the result."

INITS_CHANGING_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of `init_lora_weights` that also change the base model's weights."""

UNSUPPORTED_OPTIONS = {  # option → what an adapter with it does, for the error message
    "use_dora": "is a DoRA adapter: it rescales the columns of whole matrices",
    "lora_bias": "adds biases",
    "use_qalora": "averages its inputs in groups (QA-LoRA)",
    "layer_replication": "repeats layers of the model",
    "modules_to_save": "replaces whole modules",
    "target_parameters": "changes bare parameters instead of modules",
    "trainable_token_indices": "replaces rows of the embedding",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (activated LoRA)",
    "arrow_config": "chooses between adapters for each token (Arrow)",
    "megatron_config": "is split over machines (Megatron)",
    "ensure_weight_tying": "shares its matrices between embedding and head",
}


class LoraWeights(NamedTuple):
    """The low-rank matrices A (`down`) and B (`up`) beside one matrix; `up` includes alpha / rank."""

    down: Tensor  # (rank, in_features)
    up: Tensor  # (rank, out_features)

    def __call__(self, x: Tensor, scale: float) -> Tensor:
        """x · A · B · scale: (…, in_features) → (…, out_features)."""
        return (F.linear(x, self.down) * scale) @ self.up

    def lookup(self, ids: Tensor, scale: float) -> Tensor:
        """x · A · B · scale for the one-hot vectors x of token ids: (tokens,) → (tokens, out_features)."""
        return (self.down[:, ids].T * scale) @ self.up

    def shard(self, dim: int, start: int, stop: int) -> LoraWeights:
        """The weights of a shard of the matrix: a range of inputs (dim 0) or of outputs (dim 1)."""
        if dim == 0:
            return LoraWeights(self.down[:, start:stop].contiguous(), self.up)
        return LoraWeights(self.down, self.up[:, start:stop].contiguous())


@dataclass(frozen=True)
class PeftConfig:
    """The rank and scaling of each module, from adapter_config.json.

    The file's list of target modules is not read: the tensors tell which modules the adapter changes.
    """

    path: Path
    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[re.Pattern[str], int]
    alpha_pattern: Mapping[re.Pattern[str], float]

    @classmethod
    def read(cls, path: Path) -> PeftConfig:
        """Read and check a configuration; an option that exlm does not support is an error."""
        raw = _read_json(path)
        _check_supported(path, raw)

        def number(name: str, value: object, *, whole: bool) -> Any:
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e9:
                expected = "a whole number" if whole else "a number"
                raise BadFile(f"{path}: expected {expected} above 0 as {name}, and below 1e9; found {quoted(value)}.")
            return value

        def table(name: str, *, whole: bool) -> dict[re.Pattern[str], Any]:
            value = raw.get(name) or {}
            if not isinstance(value, dict):
                raise BadFile(f"{path}: expected numbers by module as {name}, found {quoted(value)}.")
            if sum(100 ** _count_repetitions(path, name, key) for key in value) > MAX_PATTERN_COST:
                raise Unsupported(
                    f"{path}: the {len(value)} patterns in {name} repeat too much to be matched safely: name "
                    "the modules plainly."
                )
            return {
                _compiled(path, name, key): number(f"{name}[{quoted(key)}]", one, whole=whole)
                for key, one in value.items()
            }

        return cls(
            path=path,
            r=number("r", raw.get("r"), whole=True),
            alpha=float(number("lora_alpha", raw.get("lora_alpha"), whole=False)),
            rslora=bool(raw.get("use_rslora")),
            rank_pattern=table("rank_pattern", whole=True),
            alpha_pattern=table("alpha_pattern", whole=False),
        )

    def rank(self, module: str) -> int:
        """The rank of a module's low-rank matrices."""
        rank: int = _match_pattern(self.rank_pattern, module, self.r)
        return rank

    @property
    def default_scaling(self) -> float:
        """alpha / r (rsLoRA: alpha / √r), without the patterns of single modules."""
        return self._scaling_for_rank(self.alpha, self.r)

    def scaling(self, module: str) -> float:
        return self._scaling_for_rank(_match_pattern(self.alpha_pattern, module, self.alpha), self.rank(module))

    def _scaling_for_rank(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_small_file(path, MAX_CONFIG_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"{path} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(raw, dict):
        raise BadFile(f"{path}: expected a JSON object, found {quoted(raw)}.")
    return raw


def _check_supported(path: Path, raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type", "LORA")
    if str(kind).upper() != "LORA":
        raise Unsupported(f"{path}: expected an adapter of peft_type LORA, found {quoted(kind)}. {MERGE_ADVICE}")
    for option, what in UNSUPPORTED_OPTIONS.items():
        if raw.get(option):
            raise Unsupported(f"{path}: this adapter {what} ({option}: {quoted(raw[option])}). {MERGE_ADVICE}")
    if (bias := raw.get("bias", "none")) != "none":
        raise Unsupported(f'{path}: expected bias "none", found {quoted(bias)}: it trained biases. {MERGE_ADVICE}')
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(INITS_CHANGING_BASE):
        raise Unsupported(
            f"{path}: init_lora_weights {quoted(init)} also changed the model's own weights. Convert the "
            "adapter with PEFT: save_pretrained(…, path_initial_model_for_weight_conversion=…)."
        )


def _count_repetitions(path: Path, name: str, pattern: str) -> int:
    """Count the repetition operators of an untrusted pattern; refuse exponential matching time."""
    count = len(re.findall(r"[*+?{]", pattern))
    if count > 3 or re.search(r"\)[*+?{]", pattern) or len(pattern) > 500:
        raise Unsupported(
            f"{path}: the pattern {quoted(pattern)} in {name} repeats too much to be matched safely: name "
            "the modules plainly."
        )
    return count


def _compiled(path: Path, name: str, pattern: str) -> re.Pattern[str]:
    """A pattern that matches the whole name of a module or its end."""
    try:
        re.compile(pattern)  # alone: "a)|(b" is invalid, but valid within the parentheses below
        return re.compile(rf"(?:.*\.)?(?:{pattern})")
    except (re.error, OverflowError, RecursionError) as error:
        raise BadFile(f"{path}: {quoted(pattern)} in {name} is no regular expression ({error}).") from error


def _match_pattern(patterns: Mapping[re.Pattern[str], Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the module's name or its end."""
    for pattern, value in patterns.items():
        if pattern.fullmatch(module):
            return value
    return default


@dataclass
class TargetModule:
    """A module as adapters name it: its size, and the model's matrices in it.

    A module that a family stores fused (qkv_proj) has several matrices, each some rows of its outputs.
    """

    in_features: int
    out_features: int
    matrices: dict[str, tuple[RowRange, ...]] = field(default_factory=dict)  # by role, its rows; () for all


class TargetModules:
    """Every module of a model that an adapter may change, by its name in Llama's naming scheme."""

    def __init__(self, model: spec.Model) -> None:
        self._names = model.names
        self._targets: dict[str, TargetModule] = {}
        # An embedding is a matrix whose inputs are one-hot vectors.
        embedding = Matrix("embed", model.vocab, model.hidden)
        for matrix in (embedding, *matrices(model)):
            for location in model.names.locations_of(matrix.role):
                if location.expert_rows:  # experts stacked in one tensor are not a module
                    continue
                whole = TargetModule(matrix.in_features, 0 if location.rows else matrix.out_features)
                target = self._targets.setdefault(location.key, whole)
                target.out_features = max([target.out_features, *(stop for _, stop in location.rows)])
                target.matrices[matrix.role] = location.rows

    def find(self, module: str) -> TargetModule | None:
        """The module of a stored name; None if there is none."""
        return self._targets.get(self._names.to_llama_key(module + ".weight").removesuffix(".weight"))


A, B = "A", "B"
MATRIX_BY_SUFFIX = {".lora_A.weight": A, ".lora_B.weight": B, ".lora_embedding_A": A, ".lora_embedding_B": B}
PREFIX = "base_model.model."
VISION_MODULE = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
CONVOLUTION_TENSOR = re.compile(r"\.(conv|\w*conv1d)\.lora_[AB]\.weight$")
BASE_WEIGHT_SUFFIX = ".base_layer.weight"
"""The model's own weights, which PEFT saves with an adapted embedding."""


@dataclass(frozen=True)
class PeftReader:
    """Reads the tensors of one adapter and checks them against one model."""

    path: Path
    config: PeftConfig
    model: spec.Model
    device: Callable[[str], torch.device]  # by role: the device of its module
    dtype: torch.dtype

    def read(self) -> dict[str, LoraWeights]:
        """The LoRA weights of each matrix the adapter changes, by role."""
        header, targets = read_header(self.path), TargetModules(self.model)
        found: dict[str, dict[str, str]] = {}  # module → A or B → stored name
        for name, info in header.tensors.items():
            suffix = next((suffix for suffix in MATRIX_BY_SUFFIX if name.endswith(suffix)), None)
            module = name.removeprefix(PREFIX).removesuffix(suffix or BASE_WEIGHT_SUFFIX)
            target = targets.find(module)
            if suffix is None and name.endswith(BASE_WEIGHT_SUFFIX) and target is not None:
                self._check_base_weight(name, info, target)
                continue
            if suffix is None or target is None:
                raise self._unknown_tensor_error(name, targets)
            found.setdefault(module, {})[MATRIX_BY_SUFFIX[suffix]] = name
        if not found:
            raise BadFile(f"{self.path}: expected LoRA tensors, found none among {len(header.tensors)}.")
        weights_by_role: dict[str, LoraWeights] = {}
        for module, stored_names in found.items():
            target = targets.find(module)
            assert target is not None
            for role, weights in self._split_module(header, module, target, stored_names):
                if role in weights_by_role:
                    raise BadFile(
                        f"{self.path}: {quoted(module)} changes {role}, and so does another module of the "
                        "file: expected it fused or alone, not both."
                    )
                weights_by_role[role] = weights
        return weights_by_role

    def _split_module(
        self, header: SafetensorsHeader, module: str, target: TargetModule, names: dict[str, str]
    ) -> list[tuple[str, LoraWeights]]:
        """The LoRA weights of a module, split by its matrices."""
        for matrix in (A, B):
            if matrix not in names:
                (other,) = names.values()
                raise MissingTensor(f"{self.path}: {quoted(other)} is there, but not its other half, {matrix}.")
        if "head" in target.matrices and self.model.head.normalize_rows:
            raise Unsupported(f"{self.path}: {quoted(module)} is a head that is normalised at load. {MERGE_ADVICE}")
        rank = self.config.rank(module)
        a = self._tensor(header, names[A], (rank, target.in_features))
        b = self._tensor(header, names[B], (target.out_features, rank)) * self.config.scaling(module)
        device = self.device(next(iter(target.matrices)))
        down = self._to_model_dtype(names[A], a).to(device)
        out = []
        for role, spans in target.matrices.items():
            rows = torch.cat([b[start:stop] for start, stop in spans]) if spans else b
            out.append((role, LoraWeights(down, self._to_model_dtype(names[B], rows.T).to(device))))
        return out

    def _tensor(self, header: SafetensorsHeader, name: str, shape: tuple[int, int]) -> Tensor:
        """A stored tensor as float32, its type, shape and values checked."""
        info = header.tensors[name]
        if info.dtype not in FLOAT_TYPES:
            raise BadTensor(
                f"{self._location(name)}: expected one of the types {', '.join(FLOAT_TYPES)}, found {info.dtype}."
            )
        if info.shape != shape:
            raise BadTensor(
                f"{self._location(name)}: expected shape {list(shape)}, found {list(info.shape)}: the "
                "adapter was made for another model, or adapter_config.json is another adapter's."
            )
        with self.path.open("rb") as file:
            file.seek(info.offset)
            raw = bytearray(file.read(info.nbytes))
        if len(raw) != info.nbytes:
            raise damaged(self.path, f"expected {info.nbytes} bytes of {quoted(name)}")
        values = torch.frombuffer(raw, dtype=DTYPES[info.dtype]).view(shape).float()
        if num_bad := int((~values.isfinite()).sum()):
            raise BadTensor(
                f"{self._location(name)}: expected finite values, found {num_bad} of {values.numel()} NaN or infinite."
            )
        return values

    def _to_model_dtype(self, name: str, values: Tensor) -> Tensor:
        """The values in the model's dtype."""
        converted = values.to(self.dtype).contiguous()
        if not bool(converted.isfinite().all()):
            dtype = str(self.dtype).removeprefix("torch.")
            raise BadTensor(f"{self._location(name)}: values are too large for {dtype}: load the model in bfloat16.")
        return converted

    def _check_base_weight(self, name: str, info: TensorInfo, target: TargetModule) -> None:
        """Ignore a copy of the model's own weights, but refuse one that was resized."""
        shapes = [(target.out_features, target.in_features), (target.in_features, target.out_features)]
        if info.shape not in shapes:
            raise Unsupported(
                f"{self._location(name)}: expected the model's own shape {list(shapes[0])}, found "
                f"{list(info.shape)}: it was resized for this adapter. {MERGE_ADVICE}"
            )

    def _unknown_tensor_error(self, name: str, targets: TargetModules) -> Unsupported | BadTensor:
        if "lora_magnitude_vector" in name:
            return Unsupported(
                f"{self._location(name)} belongs to a DoRA adapter, which is not supported. {MERGE_ADVICE}"
            )
        if name.endswith(".bias"):
            return Unsupported(f"{self._location(name)} is a trained bias; only bias none is supported. {MERGE_ADVICE}")
        if ".modules_to_save." in name or targets.find(name.removeprefix(PREFIX).removesuffix(".weight")):
            return Unsupported(
                f"{self._location(name)} replaces a whole module, which is not supported. {MERGE_ADVICE}"
            )
        if CONVOLUTION_TENSOR.search(name):
            return Unsupported(
                f"{self._location(name)} changes a convolution, and only adapters of matrices are supported. "
                f"{MERGE_ADVICE}"
            )
        if self.model.architecture.endswith("ConditionalGeneration") and VISION_MODULE.match(name.removeprefix(PREFIX)):
            return Unsupported(
                f"{self._location(name)} changes the vision tower, which exlm does not run. {MERGE_ADVICE}"
            )
        return BadTensor(
            f"{self._location(name)}: expected {PREFIX}<module>.lora_A.weight or lora_B.weight for a module "
            f"of {self.model.architecture}, found no such module. The adapter was made for another model."
        )

    def _location(self, name: str) -> str:
        return f"{self.path}: tensor {quoted(name)}"
