"""Several clients at once under asyncio: their requests share one batch, and one of them loses patience."""

import argparse
import asyncio

from exlm import AsyncGenerator, AsyncJob, Cache, Config, Model, Tokenizer, find_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", help="a small default model if left out")
parser.add_argument("--max-new-tokens", type=int, default=50)
args = parser.parse_args()


async def client(name: str, prompt: str, generator: AsyncGenerator, patience: int) -> None:
    """Ask, and leave after so many characters."""
    ids = generator.generator.tokenizer.encode(prompt)
    job = AsyncJob(generator, ids, max_new_tokens=args.max_new_tokens)
    text = ""
    async for result in job:
        text += result.get("text", "")
        if len(text) > patience:
            await job.cancel()
    print(f"{name}: {prompt}{text}\n")


async def main() -> None:
    """Load the model and let the clients in."""
    config = Config(find_model(args.model))
    config.max_seq_len = min(config.max_seq_len, 2048)
    model = Model(config)
    model.load()
    generator = AsyncGenerator(model, Cache(model, max_seq_len=4096), Tokenizer(config))
    try:
        await asyncio.gather(
            client("Ann", "The history of the city", generator, 10_000),
            client("Bob", "In the year 1900", generator, 10_000),
            client("Eve", "He was born in", generator, 20),
        )
    finally:
        await generator.close()


asyncio.run(main())
