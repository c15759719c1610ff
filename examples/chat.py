"""A conversation in the terminal. Each turn costs only itself: what was said before is still in the cache."""

import argparse

from exlm import LLM, Settings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a chat model; a small default model if left out")
parser.add_argument("--system", default="You are a helpful assistant. Be brief.")
parser.add_argument("--max-new-tokens", type=int, default=300)
parser.add_argument("--temperature", type=float, default=0.7)
args = parser.parse_args()

settings = Settings(temperature=args.temperature, top_k=0, top_p=0.95, token_repetition_penalty=1.0)
messages = [{"role": "system", "content": args.system}]

with LLM(args.model) as llm:
    print("An empty line ends it.")
    while True:
        try:
            said = input("> ")
        except EOFError:
            break
        if not said:
            break
        messages.append({"role": "user", "content": said})
        answer = ""
        for piece in llm.stream(messages, settings=settings, max_new_tokens=args.max_new_tokens):
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})
