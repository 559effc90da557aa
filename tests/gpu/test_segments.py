"""How a GPU's memory is taken: weights in segments that grow, a KV cache in one that others reach."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.parallel.peer_memory import export
from mpillm.engine.run.gpu_steps import use_gpu

_MIB = 1 << 20


def test_a_freed_matrix_leaves_its_memory_to_others() -> None:
    """Beside a small tensor that stays: in a segment of a fixed size the rest would be taken with it."""
    use_gpu("cuda:0")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    matrices = [torch.empty(200 * _MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    kept = []
    for matrix in matrices:
        matrix.untyped_storage().resize_(0)
        kept.append(torch.ones(30 * _MIB, dtype=torch.uint8, device="cuda"))
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 160 * _MIB
    assert all(bool(one.all()) for one in kept)


def test_a_kv_cache_can_be_exported() -> None:
    use_gpu("cuda:0")
    cache = KVCache(2, 64, 4, 32, 128, torch.bfloat16, "cuda")
    for pool in (cache.keys, cache.values):
        assert any(export(pool).handle)
