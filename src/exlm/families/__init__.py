"""Turns a model's config.json, or a GGUF file's metadata, into a `spec.Model`.

It takes parsed JSON (`ConfigReader`) and gives frozen data: `build_spec` finds the architecture's pure
function in `FAMILIES`. config, tokenizer and the packages above them may import it; it imports only errors and
spec, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import spec
from ..errors import UnknownArchitecture
from . import cohere, dbrx, delta, gemma, gpt, lfm2, llama, mamba, mistral, qwen
from .config_reader import MAX_TOTAL_EXPERTS, ConfigReader

__all__ = ["FAMILIES", "ConfigReader", "build_spec"]

FamilyFunction = Callable[[ConfigReader], spec.Model]

FAMILIES: dict[str, FamilyFunction] = {
    "BambaForCausalLM": mamba.bamba,
    "Cohere2ForCausalLM": cohere.cohere2,
    "CohereForCausalLM": cohere.cohere,
    "DbrxForCausalLM": dbrx.dbrx,
    "FalconH1ForCausalLM": mamba.falcon_h1,
    "GPT2LMHeadModel": gpt.gpt2,
    "GPTBigCodeForCausalLM": gpt.bigcode,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "Gemma3ForConditionalGeneration": gemma.gemma3,
    "GemmaForCausalLM": gemma.gemma,
    "GemmoeForCausalLM": gemma.gemmoe,
    "Glm4ForCausalLM": llama.glm4,
    "GraniteForCausalLM": llama.granite,
    "GraniteMoeHybridForCausalLM": mamba.granite_moe_hybrid,
    "IndexForCausalLM": llama.llama,
    "InternLM2ForCausalLM": llama.internlm2,
    "KimiLinearForCausalLM": delta.kimi_linear,
    "Lfm2ForCausalLM": lfm2.lfm2,
    "Lfm2MoeForCausalLM": lfm2.lfm2_moe,
    "LlamaForCausalLM": llama.llama,
    "LlavaForConditionalGeneration": mistral.pixtral,
    "MiniCPMForCausalLM": llama.minicpm,
    "Mistral3ForConditionalGeneration": mistral.pixtral,
    "MistralForCausalLM": mistral.mistral,
    "MixtralForCausalLM": mistral.mixtral,
    "NemotronHForCausalLM": mamba.nemotron_h,
    "Olmo2ForCausalLM": llama.olmo2,
    "OlmoHybridForCausalLM": delta.olmo_hybrid,
    "OrionForCausalLM": llama.orion,
    "Phi3ForCausalLM": mistral.phi3,
    "Qwen2ForCausalLM": qwen.qwen2,
    "Qwen2VLForConditionalGeneration": qwen.qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen.qwen2_vl,
    "Qwen3ForCausalLM": qwen.qwen3,
    "Qwen3MoeForCausalLM": qwen.qwen3_moe,
    "Qwen3NextForCausalLM": delta.qwen3_next,
    "Qwen3_5ForCausalLM": delta.qwen3_5,
    "Qwen3_5ForConditionalGeneration": delta.qwen3_5,
    "Qwen3_5MoeForCausalLM": delta.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": delta.qwen3_5_moe,
    "SmolLM3ForCausalLM": llama.smollm3,
    "Starcoder2ForCausalLM": gpt.starcoder2,
    "YiForCausalLM": llama.yi,
}


def build_spec(config: ConfigReader) -> spec.Model:
    """The model that this config.json describes; an unknown architecture is an error, never a guess."""
    name = config.architecture
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnknownArchitecture(f"{config.source}: architecture {name!r} is not supported. Known: {known}.")
    model = FAMILIES[name](config)
    experts = sum(layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, spec.Moe))
    if experts > MAX_TOTAL_EXPERTS:
        raise config.inconsistent(
            f"{len(model.layers)} layers have {experts} experts together; expected at most {MAX_TOTAL_EXPERTS}"
        )
    return model
