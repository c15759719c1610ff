"""Many prompts in one batch, from the parts: requests of any length come and go, the cache is shared."""

import argparse

from exlm import Cache, Config, Generator, Job, Model, Settings, Tokenizer, find_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a small default model if left out")
parser.add_argument("--jobs", type=int, default=20)
parser.add_argument("--max-new-tokens", type=int, default=50)
args = parser.parse_args()

config = Config(find_model(args.model))
config.max_seq_len = min(config.max_seq_len, 2048)
model = Model(config)
cache = Cache(model, max_seq_len=8192, lazy=True)
model.load_autosplit(cache)
tokenizer = Tokenizer(config)
generator = Generator(model, cache, tokenizer)

beginning = "Here is a list of cities and what they are known for.\n"
cities = ["Paris", "London", "Rome", "Berlin", "Madrid"]
for i in range(args.jobs):
    prompt = beginning + f"{i}. {cities[i % len(cities)]} is known for"
    job = Job(
        tokenizer.encode(prompt),
        max_new_tokens=args.max_new_tokens,
        gen_settings=Settings.greedy(),
        stop_conditions=[*tokenizer.eos_token_ids, "\n"],
        identifier=prompt.splitlines()[-1],
    )
    generator.enqueue(job)

tokens = cached = 0
while generator.num_remaining_jobs():
    for result in generator.iterate():
        if result["stage"] == "streaming" and result["eos"]:
            print(result["identifier"] + result["full_completion"])
            tokens += result["new_tokens"]
            cached += result["cached_tokens"]
print(f"{tokens} tokens; {cached} tokens of the prompts were read only once")
