"""The command line that exllamav2's scripts share.

A script calls `add_args(parser)`, then `check_args(args)`, `print_options(args)` and `init(args)`, which maps
the options to a `Config` and the arguments of `Model.load`, which validate them.
"""

from __future__ import annotations

import logging
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import NoReturn

from ..config import Config
from ..errors import InputError
from ..model import Model
from ..tokenizer import Tokenizer

log = logging.getLogger(__name__)

FLAGS = (
    ("-tp", "--tensor_parallel", "share each layer among the GPUs"),
    ("-nfa", "--no_flash_attn", "no effect: flash attention is not used"),
    ("-nxf", "--no_xformers", "no effect: xformers is not used"),
    ("-nsdpa", "--no_sdpa", "no effect: kernels are chosen while loading; model.explain() names them"),
    ("-ng", "--no_graphs", "do not replay graphs"),
    ("-lm", "--low_mem", "smaller chunks: less scratch memory, slower prompts"),
    ("-lq4", "--load_q4", "hold 16-bit layers in 4 bits (not supported: quantise the model instead)"),
    ("-fst", "--fast_safetensors", "no effect: there is one way of loading"),
    ("-ic", "--ignore_compatibility", "no effect: no model needs features turned off"),
)
VALUE_OPTIONS = (
    ("-gs", "--gpu_split", str, "'auto', or GB for each GPU, separated by commas"),
    ("-l", "--length", int, "longest sequence, in tokens"),
    ("-rs", "--rope_scale", float, "divide positions by this"),
    ("-ra", "--rope_alpha", float, "NTK alpha: stretch the rotation's base"),
    ("-ry", "--rope_yarn", float, "YaRN factor"),
    ("-ept", "--experts_per_token", int, "active experts of a mixture model"),
    ("-chunk", "--chunk_size", int, "tokens of a prompt computed at once"),
)


def add_args(parser: ArgumentParser) -> None:
    """Add every option of `init` to a parser."""
    parser.add_argument("-m", "--model_dir", type=str, help="folder of the model, or a GGUF file")
    for short, long, kind, text in VALUE_OPTIONS:
        parser.add_argument(short, long, type=kind, help=text)
    for short, long, text in FLAGS:
        parser.add_argument(short, long, action="store_true", help=text)


def check_args(args: Namespace) -> None:
    """Exit with a message if there is no model at `--model_dir`."""
    if not args.model_dir:
        _exit_with_error("No model directory specified: use -m.")
    path = Path(args.model_dir).expanduser()
    if path.is_file():
        return
    if not path.is_dir():
        _exit_with_error(f"Can't find model directory: {path}")
    if any(path.glob("*.gguf")):
        return
    for pattern in ("config.json", "tokenizer.*", "*.safetensors"):
        if not any(path.glob(pattern)):
            _exit_with_error(f"Cannot find {pattern} in {path}")


def print_options(args: Namespace) -> None:
    """Print the model and the options that were set."""
    from rich.console import Console

    given = {long[2:]: getattr(args, long[2:]) for _, long, *_ in (*VALUE_OPTIONS, *FLAGS)}
    options = [
        name if value is True else f"{name}: {value}" for name, value in given.items() if value not in (None, False)
    ]
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f" -- Model: {args.model_dir}")
    console.print(f" -- Options: {', '.join(options) or 'none'}")


def init(
    args: Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    skip_load: bool = False,
    benchmark: bool = False,
    max_batch_size: int | None = None,
    max_input_len: int | None = None,
    max_output_len: int | None = None,
    progress: bool = False,
) -> tuple[Model, Tokenizer]:
    """The model and tokenizer for the options.

    With `-gs auto` the model is returned unloaded: create a lazy cache and call
    `model.load_autosplit(cache)`. With `skip_load`, call `post_init_load`. `config.max_output_len` is always
    set, to None if not given.
    """
    config = Config(args.model_dir)
    if args.length is not None:
        config.max_seq_len = args.length
    if args.rope_scale is not None:
        config.scale_pos_emb = args.rope_scale
    if args.rope_alpha is not None:
        config.scale_alpha_value = args.rope_alpha
    if args.rope_yarn is not None:
        config.yarn_rope_factor = args.rope_yarn
    if args.experts_per_token is not None:
        config.num_experts_per_token = args.experts_per_token
    for name in ("no_flash_attn", "no_xformers", "no_sdpa", "no_graphs"):
        if getattr(args, name):  # False must not override an environment variable
            setattr(config, name, True)
    if args.no_sdpa and not quiet:
        log.warning("--no_sdpa has no effect: kernels are chosen while loading; model.explain() names them.")
    config.load_in_q4 = args.load_q4
    if max_batch_size is not None:
        config.max_batch_size = max_batch_size
    config.max_output_len = max_output_len
    if max_input_len is not None:
        config.max_input_len = max_input_len
    if args.low_mem:
        config.set_low_mem()
    if args.chunk_size is not None:
        config.max_input_len, config.max_attention_size = args.chunk_size, args.chunk_size**2
    config.arch_compat_overrides(quiet=quiet, warn_only=args.ignore_compatibility)
    config.freeze()  # validate now, also if the weights are loaded later
    model = Model(config)
    if not skip_load:
        post_init_load(model, args, quiet, allow_auto_split, benchmark, progress)
    return model, Tokenizer(config)


def post_init_load(
    model: Model,
    args: Namespace,
    quiet: bool = False,
    allow_auto_split: bool = False,
    benchmark: bool = False,
    progress: bool = False,
) -> None:
    """Load a model of `init`, unless `-gs auto` leaves that to `load_autosplit`."""
    auto = args.gpu_split == "auto"
    if auto and not args.tensor_parallel:
        if not allow_auto_split:
            raise InputError("Auto split not allowed: this script makes no lazy cache. Leave -gs out.")
        return
    split = None if auto else _parse_gpu_split(args.gpu_split)
    began = time.perf_counter()
    (model.load_tp if args.tensor_parallel else model.load)(split, progress=progress)
    if benchmark and not quiet:
        log.info("Loaded in %.2f seconds.", time.perf_counter() - began)


def _parse_gpu_split(text: str | None) -> list[float] | None:
    """GB for each device."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--gpu_split must be 'auto' or GB for each GPU, as in 20,24; found {text!r}.") from None


def _exit_with_error(message: str) -> NoReturn:
    raise SystemExit(f" ## Error: {message}")
