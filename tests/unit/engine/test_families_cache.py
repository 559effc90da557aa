"""Windows, sinks and latents over a KV cache in another type: an answer does not depend on chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.families import make_family
from tests.helpers.torch_cores import answer, make_batch, make_core

pytest.importorskip("transformers")

PROMPTS = [[3 + (7 * i + 5 * j * j) % 300 for j in range(3 + 7 * i)] for i in range(8)]
FAMILIES = ["MistralForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_in_fp8(tmp_path: Path, name: str) -> None:
    make_family(name, tmp_path)
    of = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    whole = answer(make_core(tmp_path, **of), make_batch(PROMPTS))
    chunked = answer(make_core(tmp_path, **of, max_num_tokens=7, max_batch_size=3), make_batch(PROMPTS))
    assert whole == chunked
    exact = answer(make_core(tmp_path, dtype="float32"), make_batch(PROMPTS))
    assert sum(a[:1] == b[:1] for a, b in zip(whole, exact, strict=True)) >= len(PROMPTS) - 2


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(tmp_path: Path, name: str) -> None:
    """Most first tokens are those of float32."""
    make_family(name, tmp_path)
    found, wanted = (
        answer(make_core(tmp_path, dtype=dtype), make_batch(PROMPTS)) for dtype in ("bfloat16", "float32")
    )
    assert sum(a[:1] == b[:1] for a, b in zip(found, wanted, strict=True)) >= len(PROMPTS) - 2
