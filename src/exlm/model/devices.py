"""Where a model computes and in which precision, and what must be true of the machine before it does."""

from __future__ import annotations

import logging

import torch

from .. import settings
from ..errors import InputError

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def pick_device(wish: str | None) -> torch.device:
    """The device asked for; without a wish, the first GPU, else the CPU."""
    if wish is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise InputError(f"{wish!r} is not a device: use 'cpu', 'cuda' or 'cuda:0'.") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"Device {wish!r} is not supported: use 'cpu' or 'cuda'.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise InputError(f"Device {wish!r} is not there: torch sees {count} CUDA devices. Use 'cpu'.")
        return torch.device("cuda", device.index or 0)
    return device


def pick_dtype(wish: str | None, stored: str | None, device: torch.device) -> torch.dtype:
    """The precision asked for; else float32 on a CPU; on a GPU bfloat16 for bfloat16 files, else float16."""
    if wish is not None:
        if wish.removeprefix("torch.") not in DTYPES:
            raise InputError(f"config.dtype must be one of {', '.join(DTYPES)}, found {wish!r}.")
        return DTYPES[wish.removeprefix("torch.")]
    if device.type == "cpu":
        return torch.float32
    wide = stored == "bfloat16" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if wide else torch.float16


def guard(device: torch.device, dtype: torch.dtype) -> None:
    """Keep bfloat16 on a CPU away from AMX that a virtual machine announces but does not let programs use."""
    if device.type != "cpu":
        return
    found = settings.guard_cpu()
    if found.capped and dtype is torch.bfloat16:
        # torch may have started oneDNN before the cap was set, and nothing tells: leave oneDNN out of it.
        torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
        log.warning("AMX is announced but not usable here: bfloat16 runs without oneDNN, which is slower.")
