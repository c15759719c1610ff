"""Every module of exllamav2 as a table: which names it has, and which exlm object each name stands for.

`exlm.legacy.alias_modules` makes importable modules of these tables, and hatch_build.py files in wheels.
"""

__all__: list[str] = []  # none of this is for scripts

OBJECTS: dict[str, str] = {
    "exlm": """
        AsyncGenerator as ExLlamaV2DynamicGeneratorAsync, AsyncJob as ExLlamaV2DynamicJobAsync,
        Cache as ExLlamaV2Cache, CacheBase as ExLlamaV2CacheBase, CacheFP8 as ExLlamaV2Cache_8bit,
        CacheQ4 as ExLlamaV2Cache_Q4, CacheQ6 as ExLlamaV2Cache_Q6, CacheQ8 as ExLlamaV2Cache_Q8,
        Config as ExLlamaV2Config, Filter as ExLlamaV2Filter,
        Generator as ExLlamaV2DynamicGenerator, Job as ExLlamaV2DynamicJob, Lora as ExLlamaV2Lora,
        MMEmbedding as ExLlamaV2MMEmbedding, Model as ExLlamaV2,
        PostSamplingResult as ExLlamaV2PostSamplingResult, PrefixFilter as ExLlamaV2PrefixFilter,
        Sampler as ExLlamaV2Sampler, SelectFilter as ExLlamaV2SelectFilter,
        Tokenizer as ExLlamaV2Tokenizer, __version__, EMBEDDING_INDEX
    """,
    "exlm.legacy.base_generator": """
        BaseGenerator as ExLlamaV2BaseGenerator
    """,
    "exlm.legacy.model_init": """
        add_args, check_args, init, post_init_load, print_options
    """,
    "exlm.legacy.placeholders": """
        ArchParams as ExLlamaV2ArchParams, AttentionModule as ExLlamaV2Attention,
        AttentionParams as Params, Convolution as ExLlamaV2Conv,
        DeviceContext as ExLlamaV2DeviceContext, EmbeddingModule as ExLlamaV2Embedding,
        HeadNorm as ExLlamaV2HeadNorm, JsonVocabulary as ExLlamaV2TokenizerHF,
        LayerModule as ExLlamaV2Module, LayerNorm as ExLlamaV2LayerNorm, Linear as ExLlamaV2Linear,
        LinearAttention as ExLlamaV2LinearAttention, MLP as ExLlamaV2MLP, MoEMLP as ExLlamaV2MoEMLP,
        MultimodalProjector as ExLlamaV2MultimodalProjector, PagedAttentionParams as PagedParams,
        ParallelDecoder as ExLlamaV2ParallelDecoder, PositionEmbedding as ExLlamaV2PosEmbedding,
        RMSNorm as ExLlamaV2RMSNorm, SafetensorsFile as STFile,
        SentencePieceVocabulary as ExLlamaV2TokenizerSPM, VisionTower as ExLlamaV2VisionTower,
        WebSocketServer as ExLlamaV2WebSocketServer, AdaptiveGPTQ, assert_paged_attn,
        cleanup_stfiles, compile_model, convert_to_rgb, dispatch, embeddings, exllamav2_ext,
        gen_mrope_embed, get_qparams_reduced, get_rope_params, get_standard_calibration,
        has_flash_attn, has_flash_attn_with_paged, has_flash_attn_with_softcap,
        has_flash_attn_with_window, has_lower_right_sdpa, has_xformers, make_c_ext, make_group_map,
        make_q_matrix, make_q_matrix_split, measure_quant, NgramCache, NgramCacheNode, none_tensor,
        normalize_image, optimize, position_embeddings, postprocess, preprocess, print_stage,
        QParams, qparams_attn, qparams_headoptions, qparams_mlp, quant, RopeStyle,
        size_to_longest_edge_and_patch_size, smart_resize, tokenize, TPContext
    """,
    "exlm.legacy.streaming_generator": """
        StreamingGenerator as ExLlamaV2StreamingGenerator
    """,
    "exlm.legacy.util": """
        cache_tp as ExLlamaV2Cache_TP, PostSamplingHook as ExLlamaV2PostSamplingHook,
        torch_device as _torch_device, Vocabulary as ExLlamaV2TokenizerBase, BROADCAST_ID,
        BROADCAST_KV, BROADCAST_Q, BROADCAST_RS, BROADCAST_VC, cuda_sync_active,
        get_all_gpu_memory, get_basic_progress, get_device_stream, get_tokens,
        global_streams, Intervention, list_live_tensors, pairwise, print_vram_usage,
        print_vram_usage_peak, safe_move_tensor, SeqTensor, set_device_streams, Timer
    """,
}
"""exlm module → its objects, each with its name in exllamav2 if that differs."""

MODULES: dict[str, str] = {
    "architecture": "ExLlamaV2ArchParams RopeStyle",
    "attn": "ExLlamaV2Attention assert_paged_attn has_flash_attn has_flash_attn_with_paged "
    "has_flash_attn_with_softcap has_flash_attn_with_window has_lower_right_sdpa has_xformers",
    "attn_params": "PagedParams Params",
    "cache": "ExLlamaV2Cache ExLlamaV2CacheBase ExLlamaV2Cache_8bit ExLlamaV2Cache_Q4 ExLlamaV2Cache_Q6 "
    "ExLlamaV2Cache_Q8 ExLlamaV2Cache_TP",
    "compat": "pairwise safe_move_tensor",
    "config": "ExLlamaV2Config",
    "conv": "ExLlamaV2Conv",
    "conversion": "",
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
    "ext": "exllamav2_ext make_c_ext make_group_map make_q_matrix make_q_matrix_split none_tensor",
    "fasttensors": "STFile cleanup_stfiles",
    "generator": "ExLlamaV2BaseGenerator ExLlamaV2DynamicGenerator ExLlamaV2DynamicGeneratorAsync "
    "ExLlamaV2DynamicJob ExLlamaV2DynamicJobAsync ExLlamaV2MMEmbedding ExLlamaV2PostSamplingHook "
    "ExLlamaV2PostSamplingResult ExLlamaV2Sampler ExLlamaV2StreamingGenerator __version__",
    "generator.base": "ExLlamaV2BaseGenerator ExLlamaV2Filter",
    "generator.dynamic": "ExLlamaV2DynamicGenerator ExLlamaV2DynamicGeneratorAsync ExLlamaV2DynamicJob "
    "ExLlamaV2DynamicJobAsync",
    "generator.dynamic_async": "ExLlamaV2DynamicGeneratorAsync ExLlamaV2DynamicJobAsync",
    "generator.dynamic_embeddings": "EMBEDDING_INDEX ExLlamaV2MMEmbedding",
    "generator.filters": "ExLlamaV2Filter ExLlamaV2PrefixFilter ExLlamaV2SelectFilter __version__",
    "generator.filters.base": "ExLlamaV2Filter",
    "generator.filters.prefix": "ExLlamaV2PrefixFilter",
    "generator.filters.select": "ExLlamaV2SelectFilter",
    "generator.hooks": "ExLlamaV2PostSamplingHook ExLlamaV2PostSamplingResult",
    "generator.ngram": "NgramCache NgramCacheNode",
    "generator.sampler": "ExLlamaV2Sampler",
    "generator.streaming": "ExLlamaV2StreamingGenerator",
    "headnorm": "ExLlamaV2HeadNorm",
    "intervention": "Intervention",
    "layernorm": "ExLlamaV2LayerNorm",
    "linear": "ExLlamaV2Linear",
    "linear_attn": "ExLlamaV2LinearAttention",
    "lora": "ExLlamaV2Lora",
    "mlp": "ExLlamaV2MLP",
    "model": "ExLlamaV2 ExLlamaV2Attention ExLlamaV2Cache ExLlamaV2CacheBase ExLlamaV2Config "
    "ExLlamaV2Embedding ExLlamaV2LayerNorm ExLlamaV2Linear ExLlamaV2Lora ExLlamaV2MLP ExLlamaV2MoEMLP "
    "ExLlamaV2Module ExLlamaV2ParallelDecoder ExLlamaV2PosEmbedding ExLlamaV2RMSNorm _torch_device",
    "model_init": "add_args check_args init post_init_load print_options",
    "module": "ExLlamaV2Module Intervention",
    "moe_mlp": "ExLlamaV2MoEMLP",
    "mrope": "gen_mrope_embed",
    "parallel_decoder": "ExLlamaV2ParallelDecoder",
    "pos_embedding": "ExLlamaV2PosEmbedding",
    "rmsnorm": "ExLlamaV2RMSNorm",
    "rope": "get_rope_params",
    "server": "ExLlamaV2WebSocketServer __version__",
    "server.websocket": "ExLlamaV2WebSocketServer",
    "server.websocket_actions": "dispatch",
    "stloader": "STFile cleanup_stfiles",
    "tensor_p": "BROADCAST_ID BROADCAST_KV BROADCAST_Q BROADCAST_RS BROADCAST_VC TPContext",
    "tokenizer": "ExLlamaV2Tokenizer ExLlamaV2TokenizerBase ExLlamaV2TokenizerHF ExLlamaV2TokenizerSPM __version__",
    "tokenizer.base": "ExLlamaV2TokenizerBase",
    "tokenizer.hf": "ExLlamaV2TokenizerHF",
    "tokenizer.spm": "ExLlamaV2TokenizerSPM",
    "tokenizer.tokenizer": "ExLlamaV2Tokenizer",
    "util": "SeqTensor Timer cuda_sync_active get_all_gpu_memory get_basic_progress list_live_tensors "
    "print_vram_usage print_vram_usage_peak",
    "version": "__version__",
    "vlm": "ExLlamaV2MultimodalProjector ExLlamaV2VisionTower __version__",
    "vlm.mmprojector": "ExLlamaV2MultimodalProjector",
    "vlm.processor": "pixtral qwen2 siglip",
    "vlm.processor.pixtral": "position_embeddings postprocess preprocess",
    "vlm.processor.qwen2": "position_embeddings postprocess preprocess",
    "vlm.processor.siglip": "position_embeddings postprocess preprocess",
    "vlm.util": "convert_to_rgb normalize_image size_to_longest_edge_and_patch_size smart_resize",
    "vlm.vision_tower": "ExLlamaV2VisionTower",
}
"""Module path below exllamav2 → its names; a name that is not among `OBJECTS` is a submodule."""

REFUSED: dict[str, str] = {
    "conversion.convert_exl2": "exllamav2.conversion.convert_exl2 does not exist in exlm: make EXL2 models "
    "with `exlm quantize`, or with exlm.quantize_model, where a measurement.json of the old converter works "
    "too; load them with exlm.Model."
}
"""Module → the message of the ImportError that importing it raises; it used to start a conversion."""
