"""Logits of every family equal those of transformers but for the error of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.engine.extras.special import Special
from mpillm.engine.shape.families import FAMILIES
from tests.helpers.families import make_family
from tests.helpers.gpu_steps_on_cpu import compute_as_on_a_gpu
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer_specials, make_core

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9]]  # one is longer than windows
N_OUTPUT = 9


OPTIONS: list[dict[str, Any]] = [{}, {"max_num_tokens": 16}]


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    check(name, tmp_path, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Layers with a window may have a KV cache of their own there."""
    compute_as_on_a_gpu(monkeypatch)
    check(name, tmp_path, **options, gpu_bytes=8 << 30, kv_cache_tokens=2048, max_batch_size=3)


def check(name: str, folder: Path, **options: Any) -> float:
    """Check those behind each token of prompts and of their answers; return the largest difference."""
    make_family(name, folder)
    oracle = Oracle(folder)
    specials = [Special(keeps_context_logits=True, keeps_generation_logits=True) for _ in PROMPTS]
    core = make_core(folder, dtype="float32", **options)
    answers = answer_specials(core, PROMPTS, dict(enumerate(specials)), N_OUTPUT)
    worst = 0.0
    for prompt, answer, special in zip(PROMPTS, answers, specials, strict=True):
        expected = oracle.logits(prompt + answer)[:-1]
        found = np.concatenate([*special.context_logits, np.stack(special.generation_logits)[1:]])
        assert found.shape == tuple(expected.shape)
        worst = max(worst, float((torch.from_numpy(found) - expected).norm() / expected.norm()))
    assert worst < 1e-5
    return worst
