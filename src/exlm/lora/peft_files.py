"""An adapter's tensors as changes to a model's matrices: read, checked against it, split where fused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import spec
from ..checkpoint.header import DTYPES, Entry, Header, damaged, read_header, shown
from ..checkpoint.lookup import FLOATS
from ..errors import BadFile, BadTensor, MissingTensor, Unsupported
from .layers import LoraWeights
from .peft_config import MERGE_ADVICE, PeftConfig
from .target_modules import TargetModule, TargetModules

A, B = "A", "B"
HALF_BY_SUFFIX = {
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_embedding_A": A,
    ".lora_embedding_B": B,
}
PREFIX = "base_model.model."
VISION_MODULE = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
BASE_WEIGHT_SUFFIX = (
    ".base_layer.weight"  # the model's own weights, which PEFT saves along with an embedding's adapter
)


@dataclass(frozen=True)
class PeftReader:
    """Reads one adapter for one model."""

    path: Path
    config: PeftConfig
    model: spec.Model
    device: Callable[[str], torch.device]  # of a role's module
    dtype: torch.dtype

    def read(self) -> dict[str, LoraWeights]:
        """The change of each matrix it touches, by role."""
        header, targets = read_header(self.path), TargetModules(self.model)
        found: dict[str, dict[str, str]] = {}  # module → half → stored name
        for name, entry in header.entries.items():
            ending = next((ending for ending in HALF_BY_SUFFIX if name.endswith(ending)), None)
            module = name.removeprefix(PREFIX).removesuffix(ending or BASE_WEIGHT_SUFFIX)
            target = targets.find(module)
            if ending is None and name.endswith(BASE_WEIGHT_SUFFIX) and target is not None:
                self._check_base_weight(name, entry, target)
                continue
            if ending is None or target is None:
                raise self._unknown_tensor_error(name, targets)
            found.setdefault(module, {})[HALF_BY_SUFFIX[ending]] = name
        if not found:
            raise BadFile(f"{self.path}: expected LoRA tensors, found none among {len(header.entries)}.")
        weights_by_role: dict[str, LoraWeights] = {}
        for module, stored_names in found.items():
            target = targets.find(module)
            assert target is not None
            for role, weights in self._split_module(header, module, target, stored_names):
                if role in weights_by_role:
                    raise BadFile(
                        f"{self.path}: {shown(module)} changes {role}, and so does another module of the "
                        "file: expected it fused or alone, not both."
                    )
                weights_by_role[role] = weights
        return weights_by_role

    def _split_module(
        self, header: Header, module: str, target: TargetModule, halves: dict[str, str]
    ) -> list[tuple[str, LoraWeights]]:
        """A module's change, cut into those of its matrices."""
        for half in (A, B):
            if half not in halves:
                (other,) = halves.values()
                raise MissingTensor(f"{self.path}: {shown(other)} is there, but not its other half, {half}.")
        if any(part.role == "head" for part in target.matrices) and self.model.head.normalize_rows:
            raise Unsupported(
                f"{self.path}: {shown(module)} is a head that is normalised at load. {MERGE_ADVICE}"
            )
        rank = self.config.rank(module)
        a = self._tensor(header, halves[A], (rank, target.in_features))
        b = self._tensor(header, halves[B], (target.out_features, rank)) * self.config.scaling(module)
        device = self.device(target.matrices[0].role)
        down = self._to_model_dtype(halves[A], a).to(device)
        out = []
        for part in target.matrices:
            rows = torch.cat([b[start:stop] for start, stop in part.output_spans]) if part.output_spans else b
            out.append((part.role, LoraWeights(down, self._to_model_dtype(halves[B], rows.T).to(device))))
        return out

    def _tensor(self, header: Header, name: str, shape: tuple[int, int]) -> Tensor:
        """A stored tensor in float32."""
        entry = header.entries[name]
        if entry.dtype not in FLOATS:
            raise BadTensor(
                f"{self._location(name)}: expected one of the types {', '.join(FLOATS)}, found {entry.dtype}."
            )
        if entry.shape != shape:
            raise BadTensor(
                f"{self._location(name)}: expected shape {list(shape)}, found {list(entry.shape)}: the "
                "adapter was made for another model, or adapter_config.json is another adapter's."
            )
        with self.path.open("rb") as file:
            file.seek(header.data + entry.start)
            raw = bytearray(file.read(entry.stop - entry.start))
        if len(raw) != entry.stop - entry.start:
            raise damaged(self.path, f"expected {entry.stop - entry.start} bytes of {shown(name)}")
        values = torch.frombuffer(raw, dtype=DTYPES[entry.dtype]).view(shape).float()
        if num_bad := int((~values.isfinite()).sum()):
            raise BadTensor(
                f"{self._location(name)}: expected finite values, found {num_bad} of {values.numel()} NaN or "
                "infinite."
            )
        return values

    def _to_model_dtype(self, name: str, values: Tensor) -> Tensor:
        """In the model's precision."""
        converted = values.to(self.dtype).contiguous()
        if not bool(converted.isfinite().all()):
            dtype = str(self.dtype).removeprefix("torch.")
            raise BadTensor(
                f"{self._location(name)}: values are too large for {dtype}: load the model in bfloat16."
            )
        return converted

    def _check_base_weight(self, name: str, entry: Entry, target: TargetModule) -> None:
        """The model's own weights in an adapter are of no use, unless they have grown: then we refuse."""
        shapes = [(target.out_features, target.in_features), (target.in_features, target.out_features)]
        if entry.shape not in shapes:
            raise Unsupported(
                f"{self._location(name)}: expected the model's own shape {list(shapes[0])}, found "
                f"{list(entry.shape)}: it was resized for this adapter. {MERGE_ADVICE}"
            )

    def _unknown_tensor_error(self, name: str, targets: TargetModules) -> Unsupported | BadTensor:
        if "lora_magnitude_vector" in name:
            return Unsupported(
                f"{self._location(name)} belongs to a DoRA adapter, which is not supported. {MERGE_ADVICE}"
            )
        if name.endswith(".bias"):
            return Unsupported(
                f"{self._location(name)} is a trained bias; only bias none is supported. {MERGE_ADVICE}"
            )
        if ".modules_to_save." in name or targets.find(name.removeprefix(PREFIX).removesuffix(".weight")):
            return Unsupported(
                f"{self._location(name)} replaces a whole module, which is not supported. {MERGE_ADVICE}"
            )
        if self.model.architecture.endswith("ConditionalGeneration") and VISION_MODULE.match(
            name.removeprefix(PREFIX)
        ):
            return Unsupported(
                f"{self._location(name)} changes the vision tower, which exlm does not run. {MERGE_ADVICE}"
            )
        return BadTensor(
            f"{self._location(name)}: expected {PREFIX}<module>.lora_A.weight or lora_B.weight for a module "
            f"of {self.model.architecture}, found no such module. The adapter was made for another model."
        )

    def _location(self, name: str) -> str:
        return f"{self.path}: tensor {shown(name)}"
