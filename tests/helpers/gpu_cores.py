"""Cores on a GPU: their answers and prompts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpillm.cores.torch_core import TorchCore
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import Answers

SCARCE = {"kv_cache_tokens": 160, "max_seq_len": None}


def answer(core: TorchCore, batch: Any) -> Tokens:
    core.enqueue(batch)
    answers = Answers()
    end = time.monotonic() + 120
    while not core.engine.is_idle():
        assert time.monotonic() < end, "not all answers within 120 s"
        if core.has_work():
            answers.poll(core)
        else:
            time.sleep(1e-4)
    assert not answers.errors
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
    return answers.tokens()


def random_prompts(lengths: list[int]) -> Tokens:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 512, n).tolist() for n in lengths]
