"""Tokens chosen on one GPU: the same in any batch, in the memory that is kept for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.parallel.token_chooser import with_logprobs
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.shape.memory import BYTES_TO_CHOOSE, CHOSEN_AT_ONCE
from mpillm.engine.tensors.sampler import sample
from tests.helpers.gpu_cores import answer, random_prompts
from tests.helpers.torch_cores import make_batch, make_core


def test_more_rows_than_are_chosen_for_at_once() -> None:
    rng = np.random.default_rng(5)
    n = 2 * CHOSEN_AT_ONCE + 20
    prompts = random_prompts(rng.integers(1, 30, n).tolist())
    batch = make_batch(
        prompts,
        temperature=0.7,
        seed=np.arange(n),
        top_k=[0, 20, 0, 5] * (n // 4),
        top_p=[1, 1, 0.7, 0.9] * (n // 4),
    )
    found = [
        answer(make_core("tiny-llama", dtype="float32", gpu_bytes=8 << 30, gpu=0, max_batch_size=size), batch)
        for size in (n, 10)
    ]
    # Sums on a GPU end differently in their last bits.
    assert sum(a == b for a, b in zip(*found, strict=True)) >= 0.95 * n


@pytest.mark.parametrize("way", [{}, {"top_k": 50}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
def test_choosing_takes_no_more_memory_than_is_kept(way: dict[str, Any], logprobs: bool) -> None:
    n, vocab = CHOSEN_AT_ONCE, 128_256
    logits = torch.randn(n, vocab, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    own = logits.float() if logprobs else None
    tokens = sample(logits.float(), [SamplingParams(0.7, **way)] * n, [0] * n)
    if own is not None:
        with_logprobs(tokens, own, 5)
    taken = (torch.cuda.max_memory_allocated() - before) / (n * vocab)
    print(f"{way} logprobs {logprobs}: {taken:.1f} bytes a number")
    assert taken <= BYTES_TO_CHOOSE
