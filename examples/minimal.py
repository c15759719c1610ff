"""The shortest program: load a model, continue a text."""

import argparse

from exlm import LLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="folder, .gguf file or owner/name; a small one if left out")
parser.add_argument("--prompt", default="Once upon a time")
parser.add_argument("--max-new-tokens", type=int, default=100)
args = parser.parse_args()

llm = LLM(args.model)
print(args.prompt + str(llm.generate(args.prompt, max_new_tokens=args.max_new_tokens)))
