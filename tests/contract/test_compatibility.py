"""The exllamav2 package holds exlm's own objects under old names, and refuses politely what has none."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import exllamav2
import exlm

ALIASES = [
    ("exllamav2", "ExLlamaV2", "Model"),
    ("exllamav2", "ExLlamaV2Cache", "Cache"),
    ("exllamav2", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2", "ExLlamaV2Cache_8bit", "CacheFP8"),
    ("exllamav2", "ExLlamaV2Cache_Q4", "CacheQ4"),
    ("exllamav2", "ExLlamaV2Cache_Q6", "CacheQ6"),
    ("exllamav2", "ExLlamaV2Cache_Q8", "CacheQ8"),
    ("exllamav2", "ExLlamaV2Config", "Config"),
    ("exllamav2", "ExLlamaV2Lora", "Lora"),
    ("exllamav2", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2", "__version__", "__version__"),
    ("exllamav2.cache", "ExLlamaV2Cache", "Cache"),
    ("exllamav2.cache", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2.cache", "ExLlamaV2Cache_8bit", "CacheFP8"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q4", "CacheQ4"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q6", "CacheQ6"),
    ("exllamav2.cache", "ExLlamaV2Cache_Q8", "CacheQ8"),
    ("exllamav2.config", "ExLlamaV2Config", "Config"),
    ("exllamav2.embedding", "EMBEDDING_INDEX", "EMBEDDING_INDEX"),
    ("exllamav2.generator", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator", "ExLlamaV2MMEmbedding", "MMEmbedding"),
    ("exllamav2.generator", "ExLlamaV2PostSamplingResult", "PostSamplingResult"),
    ("exllamav2.generator", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.generator", "__version__", "__version__"),
    ("exllamav2.generator.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicGenerator", "Generator"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicJob", "Job"),
    ("exllamav2.generator.dynamic", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator.dynamic_async", "ExLlamaV2DynamicGeneratorAsync", "AsyncGenerator"),
    ("exllamav2.generator.dynamic_async", "ExLlamaV2DynamicJobAsync", "AsyncJob"),
    ("exllamav2.generator.dynamic_embeddings", "EMBEDDING_INDEX", "EMBEDDING_INDEX"),
    ("exllamav2.generator.dynamic_embeddings", "ExLlamaV2MMEmbedding", "MMEmbedding"),
    ("exllamav2.generator.filters", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.filters", "__version__", "__version__"),
    ("exllamav2.generator.filters.base", "ExLlamaV2Filter", "Filter"),
    ("exllamav2.generator.filters.prefix", "ExLlamaV2PrefixFilter", "PrefixFilter"),
    ("exllamav2.generator.filters.select", "ExLlamaV2SelectFilter", "SelectFilter"),
    ("exllamav2.generator.hooks", "ExLlamaV2PostSamplingResult", "PostSamplingResult"),
    ("exllamav2.generator.sampler", "ExLlamaV2Sampler", "Sampler"),
    ("exllamav2.lora", "ExLlamaV2Lora", "Lora"),
    ("exllamav2.model", "ExLlamaV2", "Model"),
    ("exllamav2.model", "ExLlamaV2Cache", "Cache"),
    ("exllamav2.model", "ExLlamaV2CacheBase", "CacheBase"),
    ("exllamav2.model", "ExLlamaV2Config", "Config"),
    ("exllamav2.model", "ExLlamaV2Lora", "Lora"),
    ("exllamav2.server", "__version__", "__version__"),
    ("exllamav2.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.tokenizer", "__version__", "__version__"),
    ("exllamav2.tokenizer.tokenizer", "ExLlamaV2Tokenizer", "Tokenizer"),
    ("exllamav2.version", "__version__", "__version__"),
    ("exllamav2.vlm", "__version__", "__version__"),
]
LEGACY = [
    ("exllamav2", "ExLlamaV2Cache_TP", "util.cache_tp"),
    ("exllamav2", "ExLlamaV2MultimodalProjector", "placeholders.MultimodalProjector"),
    ("exllamav2", "ExLlamaV2VisionTower", "placeholders.VisionTower"),
    ("exllamav2", "Intervention", "util.Intervention"),
    ("exllamav2", "SeqTensor", "util.SeqTensor"),
    ("exllamav2", "Timer", "util.Timer"),
    ("exllamav2.attn", "ExLlamaV2Attention", "placeholders.AttentionModule"),
    ("exllamav2.attn", "assert_paged_attn", "placeholders.assert_paged_attn"),
    ("exllamav2.attn", "has_flash_attn", "placeholders.has_flash_attn"),
    ("exllamav2.attn", "has_flash_attn_with_paged", "placeholders.has_flash_attn_with_paged"),
    ("exllamav2.attn", "has_xformers", "placeholders.has_xformers"),
    ("exllamav2.cache", "ExLlamaV2Cache_TP", "util.cache_tp"),
    ("exllamav2.compat", "pairwise", "util.pairwise"),
    ("exllamav2.compat", "safe_move_tensor", "util.safe_move_tensor"),
    ("exllamav2.generator", "ExLlamaV2BaseGenerator", "base_generator.BaseGenerator"),
    ("exllamav2.generator", "ExLlamaV2PostSamplingHook", "util.PostSamplingHook"),
    ("exllamav2.generator", "ExLlamaV2StreamingGenerator", "streaming_generator.StreamingGenerator"),
    ("exllamav2.generator.base", "ExLlamaV2BaseGenerator", "base_generator.BaseGenerator"),
    ("exllamav2.generator.hooks", "ExLlamaV2PostSamplingHook", "util.PostSamplingHook"),
    (
        "exllamav2.generator.streaming",
        "ExLlamaV2StreamingGenerator",
        "streaming_generator.StreamingGenerator",
    ),
    ("exllamav2.intervention", "Intervention", "util.Intervention"),
    ("exllamav2.model", "_torch_device", "util.torch_device"),
    ("exllamav2.model_init", "add_args", "model_init.add_args"),
    ("exllamav2.model_init", "check_args", "model_init.check_args"),
    ("exllamav2.model_init", "init", "model_init.init"),
    ("exllamav2.model_init", "post_init_load", "model_init.post_init_load"),
    ("exllamav2.model_init", "print_options", "model_init.print_options"),
    ("exllamav2.server", "ExLlamaV2WebSocketServer", "placeholders.WebSocketServer"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerBase", "util.Vocabulary"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerHF", "placeholders.JsonVocabulary"),
    ("exllamav2.tokenizer", "ExLlamaV2TokenizerSPM", "placeholders.SentencePieceVocabulary"),
    ("exllamav2.util", "SeqTensor", "util.SeqTensor"),
    ("exllamav2.util", "Timer", "util.Timer"),
    ("exllamav2.util", "cuda_sync_active", "util.cuda_sync_active"),
    ("exllamav2.util", "get_all_gpu_memory", "util.get_all_gpu_memory"),
    ("exllamav2.util", "get_basic_progress", "util.get_basic_progress"),
    ("exllamav2.util", "list_live_tensors", "util.list_live_tensors"),
    ("exllamav2.util", "print_vram_usage", "util.print_vram_usage"),
    ("exllamav2.util", "print_vram_usage_peak", "util.print_vram_usage_peak"),
    ("exllamav2.vlm", "ExLlamaV2MultimodalProjector", "placeholders.MultimodalProjector"),
    ("exllamav2.vlm", "ExLlamaV2VisionTower", "placeholders.VisionTower"),
    ("exllamav2.architecture", "ExLlamaV2ArchParams", "placeholders.ArchParams"),
    ("exllamav2.architecture", "RopeStyle", "placeholders.RopeStyle"),
    ("exllamav2.attn", "has_flash_attn_with_softcap", "placeholders.has_flash_attn_with_softcap"),
    ("exllamav2.attn", "has_flash_attn_with_window", "placeholders.has_flash_attn_with_window"),
    ("exllamav2.attn", "has_lower_right_sdpa", "placeholders.has_lower_right_sdpa"),
    ("exllamav2.attn_params", "PagedParams", "placeholders.PagedAttentionParams"),
    ("exllamav2.attn_params", "Params", "placeholders.AttentionParams"),
    ("exllamav2.conv", "ExLlamaV2Conv", "placeholders.Convolution"),
    ("exllamav2.conversion.adaptivegptq", "AdaptiveGPTQ", "placeholders.AdaptiveGPTQ"),
    ("exllamav2.conversion.bot_status", "print_stage", "placeholders.print_stage"),
    ("exllamav2.conversion.compile", "compile_model", "placeholders.compile_model"),
    ("exllamav2.conversion.measure", "embeddings", "placeholders.embeddings"),
    ("exllamav2.conversion.measure", "measure_quant", "placeholders.measure_quant"),
    ("exllamav2.conversion.optimize", "optimize", "placeholders.optimize"),
    ("exllamav2.conversion.qparams", "QParams", "placeholders.QParams"),
    ("exllamav2.conversion.qparams", "get_qparams_reduced", "placeholders.get_qparams_reduced"),
    ("exllamav2.conversion.qparams", "qparams_attn", "placeholders.qparams_attn"),
    ("exllamav2.conversion.qparams", "qparams_headoptions", "placeholders.qparams_headoptions"),
    ("exllamav2.conversion.qparams", "qparams_mlp", "placeholders.qparams_mlp"),
    ("exllamav2.conversion.quantize", "list_live_tensors", "util.list_live_tensors"),
    ("exllamav2.conversion.quantize", "quant", "placeholders.quant"),
    ("exllamav2.conversion.tokenize", "get_standard_calibration", "placeholders.get_standard_calibration"),
    ("exllamav2.conversion.tokenize", "get_tokens", "util.get_tokens"),
    ("exllamav2.conversion.tokenize", "tokenize", "placeholders.tokenize"),
    ("exllamav2.device", "ExLlamaV2DeviceContext", "placeholders.DeviceContext"),
    ("exllamav2.device", "get_device_stream", "util.get_device_stream"),
    ("exllamav2.device", "global_streams", "util.global_streams"),
    ("exllamav2.device", "set_device_streams", "util.set_device_streams"),
    ("exllamav2.embedding", "ExLlamaV2Embedding", "placeholders.EmbeddingModule"),
    ("exllamav2.ext", "exllamav2_ext", "placeholders.exllamav2_ext"),
    ("exllamav2.ext", "make_c_ext", "placeholders.make_c_ext"),
    ("exllamav2.ext", "make_group_map", "placeholders.make_group_map"),
    ("exllamav2.ext", "make_q_matrix", "placeholders.make_q_matrix"),
    ("exllamav2.ext", "make_q_matrix_split", "placeholders.make_q_matrix_split"),
    ("exllamav2.ext", "none_tensor", "placeholders.none_tensor"),
    ("exllamav2.fasttensors", "STFile", "placeholders.SafetensorsFile"),
    ("exllamav2.fasttensors", "cleanup_stfiles", "placeholders.cleanup_stfiles"),
    ("exllamav2.generator.ngram", "NgramCache", "placeholders.NgramCache"),
    ("exllamav2.generator.ngram", "NgramCacheNode", "placeholders.NgramCacheNode"),
    ("exllamav2.headnorm", "ExLlamaV2HeadNorm", "placeholders.HeadNorm"),
    ("exllamav2.layernorm", "ExLlamaV2LayerNorm", "placeholders.LayerNorm"),
    ("exllamav2.linear", "ExLlamaV2Linear", "placeholders.Linear"),
    ("exllamav2.linear_attn", "ExLlamaV2LinearAttention", "placeholders.LinearAttention"),
    ("exllamav2.mlp", "ExLlamaV2MLP", "placeholders.MLP"),
    ("exllamav2.model", "ExLlamaV2Attention", "placeholders.AttentionModule"),
    ("exllamav2.model", "ExLlamaV2Embedding", "placeholders.EmbeddingModule"),
    ("exllamav2.model", "ExLlamaV2LayerNorm", "placeholders.LayerNorm"),
    ("exllamav2.model", "ExLlamaV2Linear", "placeholders.Linear"),
    ("exllamav2.model", "ExLlamaV2MLP", "placeholders.MLP"),
    ("exllamav2.model", "ExLlamaV2MoEMLP", "placeholders.MoEMLP"),
    ("exllamav2.model", "ExLlamaV2Module", "placeholders.LayerModule"),
    ("exllamav2.model", "ExLlamaV2ParallelDecoder", "placeholders.ParallelDecoder"),
    ("exllamav2.model", "ExLlamaV2PosEmbedding", "placeholders.PositionEmbedding"),
    ("exllamav2.model", "ExLlamaV2RMSNorm", "placeholders.RMSNorm"),
    ("exllamav2.module", "ExLlamaV2Module", "placeholders.LayerModule"),
    ("exllamav2.module", "Intervention", "util.Intervention"),
    ("exllamav2.moe_mlp", "ExLlamaV2MoEMLP", "placeholders.MoEMLP"),
    ("exllamav2.mrope", "gen_mrope_embed", "placeholders.gen_mrope_embed"),
    ("exllamav2.parallel_decoder", "ExLlamaV2ParallelDecoder", "placeholders.ParallelDecoder"),
    ("exllamav2.pos_embedding", "ExLlamaV2PosEmbedding", "placeholders.PositionEmbedding"),
    ("exllamav2.rmsnorm", "ExLlamaV2RMSNorm", "placeholders.RMSNorm"),
    ("exllamav2.rope", "get_rope_params", "placeholders.get_rope_params"),
    ("exllamav2.server.websocket", "ExLlamaV2WebSocketServer", "placeholders.WebSocketServer"),
    ("exllamav2.server.websocket_actions", "dispatch", "placeholders.dispatch"),
    ("exllamav2.stloader", "STFile", "placeholders.SafetensorsFile"),
    ("exllamav2.stloader", "cleanup_stfiles", "placeholders.cleanup_stfiles"),
    ("exllamav2.tensor_p", "BROADCAST_ID", "util.BROADCAST_ID"),
    ("exllamav2.tensor_p", "BROADCAST_KV", "util.BROADCAST_KV"),
    ("exllamav2.tensor_p", "BROADCAST_Q", "util.BROADCAST_Q"),
    ("exllamav2.tensor_p", "BROADCAST_RS", "util.BROADCAST_RS"),
    ("exllamav2.tensor_p", "BROADCAST_VC", "util.BROADCAST_VC"),
    ("exllamav2.tensor_p", "TPContext", "placeholders.TPContext"),
    ("exllamav2.tokenizer.base", "ExLlamaV2TokenizerBase", "util.Vocabulary"),
    ("exllamav2.tokenizer.hf", "ExLlamaV2TokenizerHF", "placeholders.JsonVocabulary"),
    ("exllamav2.tokenizer.spm", "ExLlamaV2TokenizerSPM", "placeholders.SentencePieceVocabulary"),
    ("exllamav2.vlm.mmprojector", "ExLlamaV2MultimodalProjector", "placeholders.MultimodalProjector"),
    ("exllamav2.vlm.processor.pixtral", "position_embeddings", "placeholders.position_embeddings"),
    ("exllamav2.vlm.processor.pixtral", "postprocess", "placeholders.postprocess"),
    ("exllamav2.vlm.processor.pixtral", "preprocess", "placeholders.preprocess"),
    ("exllamav2.vlm.processor.qwen2", "position_embeddings", "placeholders.position_embeddings"),
    ("exllamav2.vlm.processor.qwen2", "postprocess", "placeholders.postprocess"),
    ("exllamav2.vlm.processor.qwen2", "preprocess", "placeholders.preprocess"),
    ("exllamav2.vlm.processor.siglip", "position_embeddings", "placeholders.position_embeddings"),
    ("exllamav2.vlm.processor.siglip", "postprocess", "placeholders.postprocess"),
    ("exllamav2.vlm.processor.siglip", "preprocess", "placeholders.preprocess"),
    ("exllamav2.vlm.util", "convert_to_rgb", "placeholders.convert_to_rgb"),
    ("exllamav2.vlm.util", "normalize_image", "placeholders.normalize_image"),
    (
        "exllamav2.vlm.util",
        "size_to_longest_edge_and_patch_size",
        "placeholders.size_to_longest_edge_and_patch_size",
    ),
    ("exllamav2.vlm.util", "smart_resize", "placeholders.smart_resize"),
    ("exllamav2.vlm.vision_tower", "ExLlamaV2VisionTower", "placeholders.VisionTower"),
]
PACKAGES = [
    ("exllamav2.vlm.processor", "pixtral"),
    ("exllamav2.vlm.processor", "qwen2"),
    ("exllamav2.vlm.processor", "siglip"),
]
REFUSED = ["exllamav2.conversion.convert_exl2"]  # importing it was running it


@pytest.mark.parametrize(("module", "old", "new"), ALIASES)
def test_an_old_name_is_the_new_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    assert getattr(found, old) is getattr(exlm, new)
    assert old in found.__all__


@pytest.mark.parametrize(("module", "old", "new"), LEGACY)
def test_an_old_name_is_a_legacy_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    home, _, name = new.rpartition(".")
    assert getattr(found, old) is getattr(importlib.import_module(f"exlm.legacy.{home}"), name)
    assert old in found.__all__


def test_the_tables_are_complete() -> None:
    modules = {name for _, name, _ in pkgutil.walk_packages(exllamav2.__path__, "exllamav2.")} - set(REFUSED)
    listed = {(module, old) for module, old, _ in (*ALIASES, *LEGACY)} | set(PACKAGES)
    for module in {"exllamav2", *modules}:
        assert {(module, name) for name in importlib.import_module(module).__all__} <= listed


def test_the_installation_says_which_version_it_stands_for() -> None:
    """TabbyAPI will not start without, and asks for 0.2.8 at least."""
    said = importlib.metadata.version("exllamav2")
    assert said.split("+") == ["0.3.2", "exlm"]
    config = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = config["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "exllamav2.egg-info" in wheel["force-include"].values()


def test_modules_are_there_without_being_imported() -> None:
    """In a process of its own: this one has imported them all."""
    names = ["util", "attn", "cache", "config", "generator", "lora", "model", "tokenizer", "version", "vlm"]
    names += ["ext", "linear", "mlp", "module", "embedding", "rmsnorm", "compat", "device", "tensor_p"]
    script = "import exllamav2; " + "; ".join(f"exllamav2.{name}" for name in names)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_every_package_says_its_version() -> None:
    for package in ("", ".generator", ".generator.filters", ".tokenizer", ".vlm", ".server"):
        assert isinstance(importlib.import_module(f"exllamav2{package}").__version__, str)


@pytest.mark.parametrize("module", REFUSED)
def test_what_has_no_counterpart_says_what_to_use(module: str) -> None:
    with pytest.raises(ImportError, match=rf"{module} does not exist in exlm: .* exlm\.Model"):
        importlib.import_module(module)
