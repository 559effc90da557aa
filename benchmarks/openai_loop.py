"""``PYTHON openai_loop.py URL N AT_ONCE TOKENS_IN TOKENS_OUT``: a plain loop of the `openai` client.

It is what a person would write: N streamed completions, AT_ONCE at a time. It prints the requests per second.
PYTHON is any that has the package `openai`; nothing of mpillm is imported.
"""

from __future__ import annotations

import asyncio
import sys
import time

import openai


async def ask_all(url: str, n: int, at_once: int, n_input: int, n_output: int) -> float:
    """Return the requests per second."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        left = iter(range(n))

        async def ask_some() -> None:
            for i in left:
                prompt = [(i * n_input + j) % 1000 + 3 for j in range(n_input)]
                stream = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=n_output, temperature=0, stream=True
                )
                async for _ in stream:
                    pass

        start = time.perf_counter()
        await asyncio.gather(*(ask_some() for _ in range(at_once)))
        return n / (time.perf_counter() - start)


if __name__ == "__main__":
    print(asyncio.run(ask_all(sys.argv[1], *map(int, sys.argv[2:]))))
