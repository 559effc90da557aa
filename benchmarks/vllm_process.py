"""Answer prompts with vLLM: `VllmBaseline` runs this file with the Python of an environment that has it.

That Python knows nothing of mpillm. The first argument is a Unix socket: a line of JSON comes for each turn,
and one goes back. The first line has the arguments of `vllm.LLM`.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
from typing import IO, Any


def main(address: str) -> None:
    """Answer until the other end of the socket is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            _serve(lines)


def _serve(lines: IO[str]) -> None:
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(**json.loads(lines.readline()))
    _tell(lines, f"vLLM {vllm.__version__}, PyTorch {importlib.metadata.version('torch')}")
    for line in lines:
        turn = json.loads(line)
        # As in our engine, an end token is not allowed before an answer has its length.
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=turn["n_output"], min_tokens=turn["n_output"], detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in turn["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _tell(lines, [list(output.outputs[0].token_ids) for output in outputs])


def _tell(lines: IO[str], said: object) -> None:
    lines.write(json.dumps(said) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(sys.argv[1])
