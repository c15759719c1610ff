"""The same greedy text with a draft model, with n-grams, and without: only the number of passes differs."""

import argparse

from exlm import LLM, Settings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a small default model if left out")
parser.add_argument("--draft", help="a smaller model with the same vocabulary")
parser.add_argument("--prompt", default="The history of the city")
parser.add_argument("--max-new-tokens", type=int, default=100)
args = parser.parse_args()

texts = set()
for draft in (None, "ngram", *([args.draft] if args.draft else [])):
    with LLM(args.model, draft=draft) as llm:
        answer = llm.generate(args.prompt, settings=Settings.greedy(), max_new_tokens=args.max_new_tokens)
    texts.add(answer.text)
    passes = answer.new_tokens - answer.accepted_draft_tokens
    print(f"{draft or 'alone'}: {answer.new_tokens} tokens in {passes} passes, {answer.time_generate:.2f} s")
assert len(texts) == 1
print(args.prompt + texts.pop())
