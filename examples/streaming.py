"""Text on the screen as it is made, and what it took."""

import argparse

from exlm import LLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a small default model if left out")
parser.add_argument("--prompt", default="The history of the city")
parser.add_argument("--max-new-tokens", type=int, default=100)
parser.add_argument("--seed", type=int, help="the same seed gives the same text")
parser.add_argument("--until", help="leave as soon as this text has appeared")
args = parser.parse_args()

llm = LLM(args.model)
stream = llm.stream(args.prompt, max_new_tokens=args.max_new_tokens, seed=args.seed)
text = ""
for piece in stream:
    print(piece, end="", flush=True)
    text += piece
    if args.until and args.until in text:
        stream.close()  # the request is dropped; nothing runs on in the background
print()

if (done := stream.completion) is not None:
    speed = done.new_tokens / max(done.time_generate, 1e-9)
    print(f"{done.new_tokens} tokens at {speed:.1f} a second, ended by {done.finish_reason}")
