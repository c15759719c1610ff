"""A script as it was written for exllamav2. Nothing in it knows of exlm."""

import argparse

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model_dir")
parser.add_argument("--max_new_tokens", type=int, default=100)
args = parser.parse_args()

config = ExLlamaV2Config(args.model_dir)
config.arch_compat_overrides()
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=2048, lazy=True)
model.load_autosplit(cache, progress=True)
tokenizer = ExLlamaV2Tokenizer(config)

settings = ExLlamaV2Sampler.Settings()
settings.temperature = 0.7
settings.top_p = 0.9

generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
generator.warmup()
prompts = ["Once upon a time", "The history of the city"]
for output in generator.generate(
    prompt=prompts, max_new_tokens=args.max_new_tokens, gen_settings=settings, seed=1234, add_bos=True
):
    print(output)
    print("---")

streaming = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
streaming.set_stop_conditions([tokenizer.eos_token_id])
streaming.begin_stream_ex(tokenizer.encode("User: Hello! How are you?\nAssistant:", add_bos=True), settings)
for _ in range(args.max_new_tokens):
    result = streaming.stream_ex()
    print(result["chunk"], end="", flush=True)
    if result["eos"]:
        break
print()
