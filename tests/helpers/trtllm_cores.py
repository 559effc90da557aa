"""TensorRT-LLM's two cores in one process: requests, and the answers of the stand-in."""

from __future__ import annotations

import numpy as np

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.cores.base import LLMCore
from tests.helpers.support import wait_until

CORES = ("trtllm_executor", "trtllm_hlapi")
SINGLE = "TLLM_WORKER_USE_SINGLE_PROCESS"


def batch(*prompts: list[int], **columns: int | float) -> Batch:
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(len(prompts))
    rows["n_tokens"] = [len(prompt) for prompt in prompts]
    rows["max_output"], rows["top_p"], rows["generation"] = 4, 1, NO_INSTANCE
    for name, value in columns.items():
        rows[name] = value
    return Batch(rows, np.array([token for prompt in prompts for token in prompt], np.int32))


def rows_of(core: LLMCore, n_final: int) -> list[tuple[int, ResponseFlag, list[int]]]:
    """Return every row until so many requests have ended."""
    found: list[tuple[int, ResponseFlag, list[int]]] = []

    def ended() -> bool:
        if core.has_work() and (responses := core.poll_responses()) is not None:
            for response in responses.split():
                (row,) = response.rows
                found.append((int(row["id"]), ResponseFlag(int(row["flags"])), response.tokens.tolist()))
        return sum(ResponseFlag.FINAL in flags for _, flags, _ in found) >= n_final

    wait_until(ended, f"{n_final} answers")
    return found
