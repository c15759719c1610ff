"""Every module of exllamav2 and the names that programs import from it, as tables."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import exllamav2
from exllamav2 import _aliases
from exlm import InputError, Unsupported
from exlm.legacy.alias_modules import AliasTable

RELEASED = """
    architecture attn attn_params cache compat config conv device embedding ext fasttensors headnorm layernorm
    linear linear_attn lora mlp model model_init module moe_mlp mrope parallel_decoder pos_embedding rmsnorm
    rope stloader tensor_p util version
    conversion conversion.adaptivegptq conversion.bot_status conversion.compile conversion.measure
    conversion.optimize conversion.qparams conversion.quantize conversion.tokenize
    generator generator.base generator.dynamic generator.dynamic_async generator.dynamic_embeddings
    generator.filters generator.filters.base generator.filters.prefix generator.filters.select generator.hooks
    generator.ngram generator.sampler generator.streaming
    server server.websocket server.websocket_actions
    tokenizer tokenizer.base tokenizer.hf tokenizer.spm tokenizer.tokenizer
    vlm vlm.mmprojector vlm.processor vlm.processor.pixtral vlm.processor.qwen2 vlm.processor.siglip vlm.util
    vlm.vision_tower
"""
"""Modules of 0.3.2, and of earlier releases that programs are pinned to; paths below exllamav2."""

IMPORTED = {  # module → the names that programs import from it
    # The package's own examples and tests, test_inference.py, model_diff.py, convert.py; nearly every program
    "": "ExLlamaV2 ExLlamaV2Cache ExLlamaV2CacheBase ExLlamaV2Cache_8bit ExLlamaV2Cache_Q4 ExLlamaV2Cache_Q6 "
    "ExLlamaV2Cache_Q8 ExLlamaV2Cache_TP ExLlamaV2Config ExLlamaV2Lora ExLlamaV2MultimodalProjector "
    "ExLlamaV2Tokenizer ExLlamaV2VisionTower Intervention SeqTensor Timer __version__ attn ext model_init",
    "attn": "ExLlamaV2Attention assert_paged_attn has_flash_attn has_flash_attn_with_paged "
    "has_flash_attn_with_softcap has_flash_attn_with_window has_lower_right_sdpa has_xformers",
    "attn_params": "PagedParams Params",
    "architecture": "ExLlamaV2ArchParams RopeStyle",
    "cache": "ExLlamaV2Cache ExLlamaV2CacheBase ExLlamaV2Cache_8bit ExLlamaV2Cache_Q4 ExLlamaV2Cache_Q6 "
    "ExLlamaV2Cache_Q8 ExLlamaV2Cache_TP",
    "compat": "pairwise safe_move_tensor",
    "config": "ExLlamaV2Config",
    "conv": "ExLlamaV2Conv",
    "conversion.adaptivegptq": "AdaptiveGPTQ",
    "conversion.bot_status": "print_stage",
    "conversion.compile": "compile_model",
    "conversion.measure": "embeddings measure_quant",
    "conversion.optimize": "optimize",
    "conversion.qparams": "QParams get_qparams_reduced qparams_attn qparams_headoptions qparams_mlp",
    "conversion.quantize": "list_live_tensors quant",
    "conversion.tokenize": "get_standard_calibration get_tokens tokenize",
    "device": "ExLlamaV2DeviceContext get_device_stream global_streams set_device_streams",
    "embedding": "EMBEDDING_INDEX ExLlamaV2Embedding",
    "ext": "exllamav2_ext make_c_ext make_q_matrix none_tensor",
    "fasttensors": "STFile cleanup_stfiles",
    "generator": "ExLlamaV2BaseGenerator ExLlamaV2DynamicGenerator ExLlamaV2DynamicGeneratorAsync "
    "ExLlamaV2DynamicJob ExLlamaV2DynamicJobAsync ExLlamaV2MMEmbedding ExLlamaV2Sampler "
    "ExLlamaV2StreamingGenerator",
    "generator.base": "ExLlamaV2BaseGenerator ExLlamaV2Filter",
    "generator.dynamic": "ExLlamaV2DynamicGenerator ExLlamaV2DynamicJob",
    "generator.dynamic_async": "ExLlamaV2DynamicGeneratorAsync ExLlamaV2DynamicJobAsync",
    "generator.dynamic_embeddings": "ExLlamaV2MMEmbedding",
    "generator.filters": "ExLlamaV2Filter ExLlamaV2PrefixFilter ExLlamaV2SelectFilter",
    "generator.hooks": "ExLlamaV2PostSamplingHook ExLlamaV2PostSamplingResult",
    "generator.ngram": "NgramCache NgramCacheNode",
    "generator.sampler": "ExLlamaV2Sampler",
    "generator.streaming": "ExLlamaV2StreamingGenerator",
    "headnorm": "ExLlamaV2HeadNorm",
    "layernorm": "ExLlamaV2LayerNorm",
    "linear": "ExLlamaV2Linear",
    "linear_attn": "ExLlamaV2LinearAttention",
    "lora": "ExLlamaV2Lora",
    "mlp": "ExLlamaV2MLP",
    "model": "ExLlamaV2 ExLlamaV2Attention ExLlamaV2Cache ExLlamaV2Config ExLlamaV2Embedding "
    "ExLlamaV2LayerNorm ExLlamaV2Linear ExLlamaV2MLP ExLlamaV2MoEMLP ExLlamaV2ParallelDecoder "
    "ExLlamaV2PosEmbedding ExLlamaV2RMSNorm _torch_device",
    "model_init": "add_args check_args init post_init_load print_options",
    "module": "ExLlamaV2Module Intervention",
    "moe_mlp": "ExLlamaV2MoEMLP",
    "mrope": "gen_mrope_embed",
    "parallel_decoder": "ExLlamaV2ParallelDecoder",
    "pos_embedding": "ExLlamaV2PosEmbedding",
    "rmsnorm": "ExLlamaV2RMSNorm",
    "rope": "get_rope_params",
    "server": "ExLlamaV2WebSocketServer",
    "server.websocket": "ExLlamaV2WebSocketServer",
    "stloader": "STFile cleanup_stfiles",
    "tensor_p": "BROADCAST_ID BROADCAST_KV BROADCAST_Q BROADCAST_RS BROADCAST_VC TPContext",
    "tokenizer": "ExLlamaV2Tokenizer ExLlamaV2TokenizerBase ExLlamaV2TokenizerHF ExLlamaV2TokenizerSPM",
    "tokenizer.tokenizer": "ExLlamaV2Tokenizer",
    "util": "SeqTensor Timer cuda_sync_active get_all_gpu_memory get_basic_progress list_live_tensors "
    "print_vram_usage print_vram_usage_peak",
    "version": "__version__",
    "vlm": "ExLlamaV2MultimodalProjector ExLlamaV2VisionTower",
    "vlm.processor": "pixtral qwen2 siglip",
    "vlm.util": "convert_to_rgb normalize_image size_to_longest_edge_and_patch_size smart_resize",
    "vlm.vision_tower": "ExLlamaV2VisionTower",
}

OURS = [
    "_aliases",
    "conversion.convert_exl2",
    "intervention",
]  # the table; refuses to be imported; another home of Intervention


@pytest.mark.parametrize("path", RELEASED.split())
def test_a_module_of_exllamav2_imports(path: str) -> None:
    importlib.import_module(f"exllamav2.{path}")


def test_there_are_no_other_modules() -> None:
    found = {name for _, name, _ in pkgutil.walk_packages(exllamav2.__path__, "exllamav2.")}
    assert found == {f"exllamav2.{path}" for path in [*RELEASED.split(), *OURS]}


@pytest.mark.parametrize("path", IMPORTED)
def test_names_that_programs_import_exist(path: str) -> None:
    module = f"exllamav2.{path}".rstrip(".")
    for name in IMPORTED[path].split():
        exec(f"from {module} import {name}", {})


def test_the_imports_of_the_original_inference_test() -> None:
    """In a new process, in the order of test_inference.py."""
    script = """
from exllamav2 import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Cache, ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4
from exllamav2 import ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8, ExLlamaV2Cache_TP, ExLlamaV2Tokenizer, model_init
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler
from exllamav2.attn import ExLlamaV2Attention
from exllamav2.mlp import ExLlamaV2MLP
from exllamav2.moe_mlp import ExLlamaV2MoEMLP
from exllamav2.parallel_decoder import ExLlamaV2ParallelDecoder
from exllamav2.conversion.tokenize import get_tokens
from exllamav2.conversion.quantize import list_live_tensors
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wheel_has_the_same_modules_as_files(tmp_path: Path) -> None:
    """`hatch_build.py` writes these files; here Python imports them instead of asking the table."""
    table = AliasTable("exllamav2", _aliases.OBJECTS, _aliases.MODULES, _aliases.REFUSED)
    package = tmp_path / "exllamav2"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in table.paths():
        file = package / table.file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table.source(path), encoding="utf-8")
    script = """
import importlib, json, pkgutil, exllamav2
found = {name for _, name, _ in pkgutil.walk_packages(exllamav2.__path__, "exllamav2.")}
refused = "exllamav2.conversion.convert_exl2"
modules = [importlib.import_module(name) for name in found - {refused}]
assert all(module.__file__ and hasattr(module, name) for module in modules for name in module.__all__)
print(json.dumps([sorted(found), {module.__name__: module.__all__ for module in modules}]))
"""
    search = os.pathsep.join([str(tmp_path), str(Path(exllamav2.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": search},
    )
    found, names = json.loads(done.stdout)
    assert found == sorted(f"exllamav2.{path}" for path in table.paths())
    assert names == {f"exllamav2.{path}": sorted(of.split()) for path, of in _aliases.MODULES.items()}


def imported(path: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"exllamav2.{path}"), name)
    return found


PLACEHOLDERS = [  # module, name, and the remedy in the error
    ("architecture", "ExLlamaV2ArchParams", r"config\.arch"),
    ("attn_params", "Params", r"model\.forward"),
    ("attn_params", "PagedParams", "ExLlamaV2DynamicGenerator"),
    ("conv", "ExLlamaV2Conv", "model\\.explain"),
    *(
        ("conversion." + path, name, "`exlm quantize`")
        for path, name in [
            ("adaptivegptq", "AdaptiveGPTQ"),
            ("bot_status", "print_stage"),
            ("compile", "compile_model"),
            ("measure", "embeddings"),
            ("measure", "measure_quant"),
            ("optimize", "optimize"),
            ("qparams", "QParams"),
            ("qparams", "qparams_attn"),
            ("quantize", "quant"),
            ("tokenize", "tokenize"),
            ("tokenize", "get_standard_calibration"),
        ]
    ),
    ("device", "ExLlamaV2DeviceContext", r"config\.device"),
    *(
        (path, name, r"model\.explain\(\)")
        for path, name in [
            ("embedding", "ExLlamaV2Embedding"),
            ("ext", "exllamav2_ext"),
            ("ext", "make_c_ext"),
            ("ext", "make_q_matrix"),
            ("headnorm", "ExLlamaV2HeadNorm"),
            ("layernorm", "ExLlamaV2LayerNorm"),
            ("linear", "ExLlamaV2Linear"),
            ("linear_attn", "ExLlamaV2LinearAttention"),
            ("mlp", "ExLlamaV2MLP"),
            ("module", "ExLlamaV2Module"),
            ("moe_mlp", "ExLlamaV2MoEMLP"),
            ("parallel_decoder", "ExLlamaV2ParallelDecoder"),
            ("pos_embedding", "ExLlamaV2PosEmbedding"),
            ("rmsnorm", "ExLlamaV2RMSNorm"),
        ]
    ),
    ("stloader", "STFile", "safe_open"),
    ("generator.ngram", "NgramCache", "use_ngram_draft=True"),
    ("mrope", "gen_mrope_embed", r"config\.scale_pos_emb"),
    ("rope", "get_rope_params", r"config\.scale_pos_emb"),
    ("server.websocket_actions", "dispatch", "`exlm serve`"),
    ("tensor_p", "TPContext", r"Model\.load_tp"),
    ("vlm.util", "convert_to_rgb", "ExLlamaV2MMEmbedding"),
    ("vlm.processor.qwen2", "preprocess", "ExLlamaV2MMEmbedding"),
]


@pytest.mark.parametrize(("path", "name", "remedy"), PLACEHOLDERS)
def test_a_placeholder_names_the_remedy_when_it_is_used(path: str, name: str, remedy: str) -> None:
    with pytest.raises(Unsupported, match=remedy):
        imported(path, name)("model", "model.layers.0", layer_idx=0)


def test_scripts_may_search_for_layer_classes(model: exllamav2.ExLlamaV2) -> None:
    kinds = tuple(
        imported(path, name)
        for path, name in [
            ("attn", "ExLlamaV2Attention"),
            ("mlp", "ExLlamaV2MLP"),
            ("moe_mlp", "ExLlamaV2MoEMLP"),
            ("parallel_decoder", "ExLlamaV2ParallelDecoder"),
        ]
    )
    assert not any(isinstance(module, kinds) for module in model.modules)  # type: ignore[arg-type]


def test_methods_of_a_placeholder_cannot_be_read_or_replaced() -> None:
    layer: Any = imported("mlp", "ExLlamaV2MLP")
    assert not hasattr(layer, "forward")
    with pytest.raises(AttributeError, match=r"MLP\.forward does not exist in exlm\. .* model\.explain\(\)"):
        _ = layer.forward
    with pytest.raises(Unsupported, match=r"MLP\.forward cannot be exchanged: nothing calls it"):
        layer.forward = print
    with pytest.raises(AttributeError, match=r"SafetensorsFile\.open does not exist in exlm\. .*safe_open"):
        imported("stloader", "STFile").open("model.safetensors")  # type: ignore[attr-defined]

    class Mine(layer):  # type: ignore[misc]
        """A subclass in a script, which may be defined but not created."""

        scale = 2

    with pytest.raises(Unsupported, match=r"model\.explain"):
        Mine("model", "model.layers.0")


def test_the_extension_can_be_imported_and_not_called() -> None:
    extension: Any = imported("ext", "exllamav2_ext")
    with pytest.raises(Unsupported, match=r"exllamav2_ext\.rms_norm does not exist in exlm\. Nothing is compiled"):
        extension.rms_norm(torch.zeros(1))
    assert not hasattr(extension, "__wrapped__")
    assert imported("ext", "none_tensor").device.type == "meta"  # type: ignore[attr-defined]
    options: Any = imported("conversion.qparams", "qparams_headoptions")
    for use in (lambda: 6 in options, lambda: options[6], lambda: list(options)):
        with pytest.raises(Unsupported, match="`exlm quantize`"):
            use()


def test_functions_without_a_purpose_in_exlm_do_nothing() -> None:
    assert imported("stloader", "cleanup_stfiles")() is None
    assert imported("device", "set_device_streams")() is None
    assert imported("device", "get_device_stream")(0) is None
    assert imported("device", "global_streams") == {}
    assert [imported("tensor_p", f"BROADCAST_{name}") for name in ("KV", "ID", "VC", "RS", "Q")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert [int(one) for one in imported("architecture", "RopeStyle")] == [0, 1, 2]  # type: ignore[attr-defined]


def test_get_tokens_reads_a_dataset(tokenizer: exllamav2.ExLlamaV2Tokenizer, tmp_path: Path) -> None:
    texts = ["Once upon a time there was a dog.", "The city was old.", "Jack smiled."]
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    ids = imported("conversion.tokenize", "get_tokens")(3, 5, tmp_path / "texts.jsonl", tokenizer)
    assert ids.shape == (3, 5)
    assert ids.dtype is torch.int64
    whole = torch.cat([tokenizer.encode(text)[0] for text in texts])
    assert ids.flatten().tolist() == whole[:15].tolist()
    with pytest.raises(InputError, match=rf"has {len(whole)} tokens, and 9 rows of 99 take 891"):
        imported("conversion.tokenize", "get_tokens")(9, 99, str(tmp_path / "texts.jsonl"), tokenizer)
    with pytest.raises(InputError, match="at least 1 row"):
        imported("conversion.tokenize", "get_tokens")(0, 5, tmp_path / "texts.jsonl", tokenizer)
