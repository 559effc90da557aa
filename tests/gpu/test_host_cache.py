"""Blocks of the KV cache in pinned host memory: what is saved is loaded again, and tokens stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.cache.host_cache import HostCache
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.schedule.host_blocks import BlockCopy
from tests.helpers.gpu_cores import answer, random_prompts
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import make_batch, make_core


@pytest.mark.parametrize("n_parts", [1, 2], ids=["latents", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_is_saved_is_loaded(dtype: torch.dtype, n_parts: int) -> None:
    cache = KVCache(3, 6, 2, 32, 64, dtype, "cuda", n_parts=n_parts)
    contents = [pool.view(torch.uint8) for pool in cache.pools]
    for content in contents:
        content.copy_(torch.randint(0, 100, content.shape, device="cuda"))
    before = [content.clone() for content in contents]
    host = HostCache(cache, 2)
    host.copy([BlockCopy(1, 1, False), BlockCopy(2, 2, False)])
    for content in contents:
        content[:, 1:3] = 0
    # Loads, a block that another one replaces in host memory, and its content in a third block.
    host.copy([BlockCopy(5, 1, True), BlockCopy(3, 2, False), BlockCopy(6, 2, True)])
    for content, old in zip(contents, before, strict=True):
        assert torch.equal(content[:, 5], old[:, 1])
        assert torch.equal(content[:, 6], old[:, 3])
        assert torch.equal(content[:, 3:5], old[:, 3:5])


def test_tokens(tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    prompts = random_prompts([40, 90, 33, 70, 64, 65])
    on_gpu = {"gpu_bytes": 8 << 30, "gpu": 0, "tokens_per_block": 16}
    expected = answer(make_core(tmp_path, **on_gpu), make_batch(prompts))
    scarce = {"kv_cache_tokens": 160, "max_seq_len": None, "enable_kv_cache_reuse": True}
    core = make_core(tmp_path, **on_gpu, **scarce, kv_host_cache_gb=0.1)
    for _ in range(3):
        assert answer(core, make_batch(prompts)) == expected
    assert core.statistics()["loaded_blocks"] > 0
