"""Answer prompts with vLLM: `VllmBaseline` runs this file with the Python of vLLM's environment.

mpillm is not installed there. The argument is a Unix socket. It receives a line of JSON for each turn and
sends one back. The first line contains the arguments of `vllm.LLM`.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
from typing import IO, Any


def main(address: str) -> None:
    """Answer until the other end closes the socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            _serve(lines)


def _serve(lines: IO[str]) -> None:
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(**json.loads(lines.readline()))
    _send(lines, f"vLLM {vllm.__version__}, PyTorch {importlib.metadata.version('torch')}")
    for line in lines:
        turn = json.loads(line)
        # Like in the engine, end tokens are not allowed before the answer's full length.
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=turn["n_output"], min_tokens=turn["n_output"], detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in turn["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        _send(lines, [list(output.outputs[0].token_ids) for output in outputs])


def _send(lines: IO[str], value: object) -> None:
    lines.write(json.dumps(value) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(sys.argv[1])
