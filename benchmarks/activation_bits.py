"""What rounded activations cost in quality: `python -m benchmarks.activation_bits [MODEL.gguf]`.

The model is requantised to each type and reads a text. The reference is the same file computed by plain torch in
float32, with every weight as the file defines it. The table has the mean KL divergence of the next-token distribution
from the reference's, in nats, and the share of positions with another most likely token: with activations of 16 and of
8 bits (`Config.cpu_activation_bits`), and, if xllamacpp is installed, of llama.cpp. Its library also quantises the
K-quants and IQ4 types; without it the table has the types that the gguf package can quantise.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from exlm import Cache, Config, Model, Tokenizer, find_model

TEXTS = Path(__file__).resolve().parents[1] / "src" / "exlm" / "quantize" / "texts"
SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
OTHER_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""As llama.cpp chooses them for rows that are no multiple of 256."""

HEAD_TYPE = "Q8_0"  # of the embedding table, which is often the head too

Floats = np.ndarray[Any, np.dtype[np.float32]]
Quantize = Callable[[Floats, gguf.GGMLQuantizationType], np.ndarray[Any, Any]]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a .gguf file; default: the default model")
    parser.add_argument("--types", help=f"some of {', '.join(SIMPLE_TYPES + OTHER_TYPES)}; default: all")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    args = parser.parse_args()
    source, has_peer = Path(find_model(args.model, progress=True)), find_spec("xllamacpp") is not None
    library = LlamaCpp() if has_peer else None
    quantize: Quantize = gguf.quants.quantize if library is None else library.quantize
    types = args.types.split(",") if args.types else SIMPLE_TYPES + (OTHER_TYPES if has_peer else ())
    text = "\n".join((TEXTS / name).read_text(encoding="utf-8") for name in ("english.txt", "technical.txt"))
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for name in types:
        with TemporaryDirectory() as folder:
            file = requantize(source, Path(folder) / f"{name}.gguf", name, quantize)
            config = Config(file)
            ids = Tokenizer(config).encode(text)[:, : args.tokens]
            os.environ["EXLM_CPU"] = "0"
            reference = log_probs(file, ids, 16)
            del os.environ["EXLM_CPU"]
            found = {"16 bits": log_probs(file, ids, 16), "8 bits": log_probs(file, ids, 8)}
            if library is not None:
                found["llama.cpp"] = library.log_probs(file, ids[0].tolist(), reference.shape[1])
            rows[name] = {engine: divergence(reference, one) for engine, one in found.items()}
            print(name, rows[name], flush=True)
    Console(width=110).print(table(rows, f"{source.name}, {args.tokens} tokens"))
    if args.json:
        args.json.write_text(json.dumps({"model": source.name, "tokens": args.tokens, "types": rows}, indent=1))


def requantize(source: Path, target: Path, name: str, quantize: Quantize) -> Path:
    """Write the file with its matrices in another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = HEAD_TYPE if tensor.name in ("token_embd.weight", "output.weight") else name
        if weights.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            kind = FALLBACKS[kind]
        chosen = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(tensor.name, quantize(weights, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def log_probs(file: Path, ids: torch.Tensor, activation_bits: int) -> torch.Tensor:
    """The log-probabilities of the token after each token."""
    config = Config(file)
    config.device, config.dtype, config.cpu_activation_bits = "cpu", "float32", activation_bits
    model = Model(config)
    model.load()
    cache = Cache(model, max_seq_len=-(-ids.shape[1] // 256) * 256, dtype="float32")
    found: torch.Tensor = model.forward(ids, cache)[0].float().log_softmax(-1)
    model.unload()
    return found


def divergence(reference: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """(mean KL divergence in nats, share of positions with another most likely token)."""
    kl = sum(float((p.double().exp() * (p.double() - q.double())).sum()) for p, q in zip(reference, found, strict=True))
    return kl / len(reference), float((reference.argmax(1) != found.argmax(1)).double().mean())


def table(rows: dict[str, dict[str, tuple[float, float]]], title: str) -> Table:
    """A row for each type."""
    engines = list(next(iter(rows.values())))
    out = Table("type", *(f"KL, {one}" for one in engines), *(f"changed, {one}" for one in engines), title=title)
    for name, found in rows.items():
        divergences = [f"{found[one][0]:.2e}" for one in engines]
        out.add_row(name, *divergences, *(f"{100 * found[one][1]:.1f} %" for one in engines))
    return out


class LlamaCpp:
    """llama.cpp's own functions, in the library of the xllamacpp wheel."""

    class Params(ctypes.Structure):
        """Parameters, passed by value; larger than any version's."""

        _fields_ = (("sizes", ctypes.c_uint32 * 4), ("rest", ctypes.c_uint8 * 1008))

    class Batch(ctypes.Structure):
        """llama_batch."""

        _fields_ = (
            ("n_tokens", ctypes.c_int32),
            ("token", ctypes.POINTER(ctypes.c_int32)),
            ("embd", ctypes.c_void_p),
            ("pos", ctypes.POINTER(ctypes.c_int32)),
            ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
            ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            ("logits", ctypes.POINTER(ctypes.c_int8)),
        )

    def __init__(self) -> None:
        package = find_spec("xllamacpp")
        assert package is not None
        assert package.origin is not None
        library = ctypes.CDLL(str(next(Path(package.origin).parent.glob("xllamacpp*.so"))))
        library.llama_backend_init()
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        for name, result, *arguments in (
            ("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, long, long, long, pointer),
            ("llama_model_default_params", self.Params),
            ("llama_context_default_params", self.Params),
            ("llama_model_load_from_file", pointer, ctypes.c_char_p, self.Params),
            ("llama_init_from_model", pointer, pointer, self.Params),
            ("llama_batch_init", self.Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
            ("llama_decode", ctypes.c_int32, pointer, self.Batch),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, ctypes.c_int32),
            ("llama_free", None, pointer),
            ("llama_model_free", None, pointer),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library: Any = library

    def quantize(self, weights: Floats, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
        """(outputs, inputs) floats → (outputs, bytes of a row) in a type."""
        outputs, inputs = weights.shape
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((outputs, inputs // block * block_bytes), dtype=np.uint8)
        importance = np.ones(inputs, dtype=np.float32)
        weights = np.ascontiguousarray(weights)
        arguments = kind.value, weights.ctypes.data, out.ctypes.data, 0, outputs, inputs
        self._library.ggml_quantize_chunk(*arguments, importance.ctypes.data)
        return out

    def log_probs(self, file: Path, tokens: list[int], vocab: int) -> torch.Tensor:
        """The log-probabilities of the token after each token."""
        library, count = self._library, len(tokens)
        model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        params = library.llama_context_default_params()
        params.sizes[0] = params.sizes[1] = params.sizes[2] = count  # n_ctx, n_batch, n_ubatch
        context = library.llama_init_from_model(model, params)
        batch = library.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if library.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not compute the text")
        row = partial(np.ctypeslib.as_array, shape=(vocab,))
        found = np.stack([row(library.llama_get_logits_ith(context, i)).copy() for i in range(count)])
        library.llama_free(context)
        library.llama_model_free(model)
        return torch.from_numpy(found).log_softmax(-1)


if __name__ == "__main__":
    main()
