"""Guesses on one GPU: answers are those without them, and guesses those of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.helpers.draft_tokens import NGRAM, draft_target, save_half
from tests.helpers.eagle_heads import Seen, eagle, save_head
from tests.helpers.gpu_cores import SCARCE, answer
from tests.helpers.mtp_heads import mtp, save_model
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import N_OUTPUT, Answers, make_batch, make_core


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 5, "max_num_tokens": 24}, SCARCE], ids=str)
@pytest.mark.parametrize("kind", ["NGram", "the model itself", "half of it"])
def test_guesses(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Tokens are those of the CPU without guesses, through graphs of several rows of a sequence and beside
    contexts, and nothing is compiled for them. With more requests than `max_concurrency` at first, too."""
    how: dict[str, Any] = NGRAM
    if kind != "NGram":
        draft = tmp_path / "draft"
        save_preset("tiny-llama", tmp_path)
        draft.mkdir()
        save_half(tmp_path, draft)
        how = draft_target(tmp_path if kind == "the model itself" else draft, 4)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 512, n).tolist() * 3 for n in rng.integers(1, 22, 20)]
    on_cpu = make_core("tiny-llama", dtype="float32")
    batch = make_batch(prompts, max_output=[N_OUTPUT] * 17 + [3 * N_OUTPUT] * 3)
    on_cpu.enqueue(batch)
    wanted = Answers().run(on_cpu).tokens()
    for more in ({}, {"max_concurrency": 3}):
        core = make_core(
            "tiny-llama",
            dtype="float32",
            gpu_bytes=8 << 30,
            gpu=0,
            speculative_config=how | more,
            **options,
        )
        core.start_test()
        found = answer(core, batch)
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 19
        counts = core.statistics()
        assert 0 < counts["accepted_tokens"] <= counts["drafted_tokens"]
        if kind == "the model itself":  # a near tie now and then
            assert counts["accepted_tokens"] > 0.95 * counts["drafted_tokens"]
        assert core.compiled_in_test() == []


@pytest.mark.parametrize("kind", ["Eagle", "MTP"])
def test_a_head(kind: str, tmp_path: Path) -> None:
    """It guesses what it guesses on a CPU, after right and wrong guesses, and nothing is compiled for it."""
    vocab_size = 512
    if kind == "Eagle":
        save_preset("tiny-llama", tmp_path)
        save_head(tmp_path, tmp_path / "head")
        how = eagle(tmp_path / "head", 4)
    else:
        vocab_size = save_model(tmp_path).config.vocab_size
        how = mtp(4)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, vocab_size - 1, n).tolist() for n in rng.integers(3, 60, 20)]
    plain = make_core(tmp_path, dtype="float32")
    plain.enqueue(make_batch(prompts))
    wanted = Answers().run(plain).tokens()
    right = {tuple(prompt): tokens for prompt, tokens in zip(prompts, wanted, strict=True)}
    drafts = []
    for options in ({}, {"gpu_bytes": 8 << 30, "gpu": 0}, {"gpu_bytes": 8 << 30, "gpu": 0, **SCARCE}):
        core = make_core(tmp_path, dtype="float32", speculative_config=how, max_num_tokens=100, **options)
        seen = Seen(core, right)
        core.start_test()
        found = answer(core, make_batch(prompts))
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 19
        assert core.statistics()["accepted_tokens"] > 0
        assert core.compiled_in_test() == []
        drafts.append({tuple(tokens): guesses for tokens, guesses in seen.drafts if guesses})
    for on_gpu in drafts[1:]:
        both = drafts[0].keys() & on_gpu.keys()
        assert len(both) > 40
        assert sum(drafts[0][tokens] == on_gpu[tokens] for tokens in both) >= 0.95 * len(both)
