"""One model, one batch, and every request with an adapter of its own or none."""

import argparse

from exlm import LLM, Job, Lora, Settings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="the model the adapters were made for")
parser.add_argument("loras", nargs="+", help="PEFT folders")
parser.add_argument("--prompt", default="The history of the city")
parser.add_argument("--max-new-tokens", type=int, default=50)
args = parser.parse_args()

with LLM(args.model) as llm:
    adapters = {path: Lora.from_directory(llm.model, path) for path in args.loras}
    for name, adapter in {"no adapter": [], **adapters}.items():
        job = Job(
            llm.tokenizer.encode(args.prompt),
            max_new_tokens=args.max_new_tokens,
            gen_settings=Settings.greedy(),
            loras=adapter,
            identifier=name,
        )
        llm.generator.enqueue(job)
    while llm.generator.num_remaining_jobs():
        for result in llm.generator.iterate():
            if result["eos"]:
                print(f"{result['identifier']}:\n{args.prompt}{result['full_completion']}\n")
