"""Attention of contexts multiplied in fp8, against float32."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("no GPU that multiplies fp8", allow_module_level=True)

from mpillm.engine.kernels import step_kernels as kernels
from mpillm.engine.model.context_plan import ContextPlan
from mpillm.engine.schedule.step import Span
from tests.helpers import plain_kernels as plain


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"), [(8, 1, 128), (8, 2, 64), (6, 2, 128), (4, 4, 128), (64, 1, 64)]
)
def test_contexts(heads: int, kv_heads: int, d: int) -> None:
    """Sequences of several lengths, each behind cached tokens, in blocks in any order."""
    torch.manual_seed(0)
    size, counts, cached = 32, [128, 200, 333, 700], [1, 64, 129, 1411]
    per_slot = -(-max(map(sum, zip(counts, cached, strict=True))) // size)
    slots = len(counts)
    n_blocks = slots * per_slot + 1
    keys, values = torch.randn(2, n_blocks, kv_heads, size, d, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(2, kv_heads, device="cuda") + 0.5
    table = (torch.randperm(n_blocks - 1, device="cuda") + 1).view(slots, per_slot).to(torch.int32)
    spans = [Span(i, before, n, 0, []) for i, (before, n) in enumerate(zip(cached, counts, strict=True))]
    starts = [sum(counts[:i]) for i in range(slots)]
    qkv = torch.randn(sum(counts), heads + 2 * kv_heads, d, device="cuda", dtype=torch.bfloat16)
    qkv[5, :heads] = 0
    tile = kernels.context_tile(heads, kv_heads, torch.bfloat16, 0, True)
    plan = ContextPlan.of(spans, starts, tile, 1 << 16)
    assert len(plan.copies) == slots and plan.n_copied % 64 == 0
    copies, tiles = torch.from_numpy(plan.copies).cuda(), torch.from_numpy(plan.tiles[1]).cuda()
    poison = torch.full((64 << 20,), 0x7F, dtype=torch.uint8, device="cuda")  # NaN in fp8
    del poison
    out, wanted = torch.full((2, len(qkv), heads * d), torch.nan, device="cuda", dtype=torch.bfloat16)
    for module, to in ((kernels, out), (plain, wanted)):
        module.fp8_context_attention(
            qkv, keys, values, scales, table, copies, plan.n_copied, plan.longest, tiles, to, heads
        )
    error = (out.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 0.06  # of random values, whose average is as small as what rounding changes
