"""Sampled tokens follow the distribution that was asked for and do not depend on the batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpillm.engine.parallel import token_chooser
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.tensors.sampler import likeliest, sample
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import answer, make_batch, make_core


@pytest.mark.long
def test_sampled_tokens_do_not_depend_on_the_batching(folder: Path, prompts: Tokens) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "seed": np.arange(len(prompts)),
        "top_k": [0, 20] * 10,
        "top_p": [1, 1, 0.7, 0.9] * 5,
    }
    together = answer(make_core(folder), make_batch(prompts, **fields))
    assert (
        answer(make_core(folder, max_batch_size=3, max_num_tokens=20), make_batch(prompts, **fields))
        == together
    )
    scarce = make_core(folder, kv_cache_tokens=160, max_seq_len=None)
    assert answer(scarce, make_batch(prompts, **fields)) == together
    assert scarce.statistics()["preemptions"] > 0
    other = answer(make_core(folder), make_batch(prompts, **fields | {"seed": np.arange(len(prompts)) + 100}))
    assert sum(a != b for a, b in zip(together, other, strict=True)) > len(prompts) // 2


@pytest.mark.parametrize("sampled", [True, False])
def test_tokens_are_chosen_for_a_few_rows_at_once(
    folder: Path, prompts: Tokens, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    """Copies of a whole batch's logits would take gigabytes of a GPU. Greedy tokens take no copies."""
    fields: dict[str, Any] = {"min_output": [3, 0, 9, 1] * 5}
    if sampled:
        fields |= {"temperature": [1.0, 0.0] * 10, "top_p": [0.9, 1, 1, 1] * 5, "seed": np.arange(20)}
    core_fields: dict[str, Any] = {"end_ids": tuple(range(0, 512, 2))}
    expected = answer(make_core(folder, **core_fields), make_batch(prompts, **fields))
    n_rows: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        n_rows.append(len(arguments[0]))
        return sample(*arguments)

    monkeypatch.setattr(token_chooser, "sample", noted)
    core = make_core(folder, **core_fields)
    core.engine.worker.chooser.max_rows = 3
    assert answer(core, make_batch(prompts, **fields)) == expected
    assert max(n_rows, default=0) == (3 if sampled else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1000, 1024, 2048, 5000])
def test_the_likeliest_token_is_the_first_of_the_best(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(40, vocab).to(dtype)
    logits[:10] = logits[:10].round()  # so that many are equal
    logits[10] = 0
    logits[11] = -torch.inf
    logits[12, -1] = 99
    assert torch.equal(likeliest(logits), logits.float().argmax(-1))


@pytest.mark.long
def test_top_k_1_and_a_tiny_top_p_are_greedy(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder)
    assert answer(core, make_batch(prompts, temperature=1.0, top_k=1)) == expected
    assert answer(core, make_batch(prompts, temperature=1.0, top_p=1e-6, seed=3)) == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.6), (5, 0.75)])
@pytest.mark.long
def test_the_distribution_of_sampled_tokens(top_k: int, top_p: float) -> None:
    n, temperature = 20_000, 0.8
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, 1.5, -3.0, 0.8])
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[: top_k or None]
    renormalized = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: int((renormalized.cumsum(-1) < top_p).sum()) + 1]
    wanted = torch.zeros(8)
    wanted[kept] = probabilities[kept] / probabilities[kept].sum()
    params = [SamplingParams(temperature, top_k, top_p, seed=i // 100) for i in range(n)]
    tokens = sample(logits.repeat(n, 1), params, [i % 100 for i in range(n)])
    found = torch.bincount(tokens, minlength=8) / n
    assert set(torch.nonzero(found).flatten().tolist()) <= set(kept.tolist())
    torch.testing.assert_close(found, wanted, atol=0.015, rtol=0)
