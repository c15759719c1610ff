"""An answer that is always valid JSON of the wanted shape. Needs: pip install 'exlm[grammar]'"""

import argparse
import json

from exlm import LLM, Settings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a chat model; a small default model if left out")
parser.add_argument("--text", default="Marie Curie was born in Warsaw in 1867.")
parser.add_argument("--max-new-tokens", type=int, default=200)
args = parser.parse_args()

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "place": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
    },
    "required": ["name", "place", "year"],
    "additionalProperties": False,
}

llm = LLM(args.model)
answer = llm.chat(
    f"Who was born where, and when? {args.text}",
    json_schema=schema,
    settings=Settings.greedy(),
    max_new_tokens=args.max_new_tokens,
)
if answer.finish_reason == "max_new_tokens":
    raise SystemExit(f"cut off after {answer.new_tokens} tokens: raise --max-new-tokens")
for name, value in json.loads(answer.text).items():
    print(f"{name}: {value}")
