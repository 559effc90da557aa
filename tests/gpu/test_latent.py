"""Latent attention and experts in groups on a GPU: kernels against plain PyTorch, answers against the CPU's.

The kernels' tests run without a GPU, too, with TRITON_INTERPRET=1 and Triton installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.cache.kv_cache import rounded  # noqa: E402
from mpillm.engine.kernels import ops  # noqa: E402
from mpillm.engine.kernels import step_kernels as kernels  # noqa: E402
from mpillm.engine.shape.dtypes import torch_dtype  # noqa: E402
from tests.helpers import plain_kernels as plain  # noqa: E402
from tests.helpers.families import make_family  # noqa: E402
from tests.helpers.gpu_cores import SCARCE, answer, random_prompts  # noqa: E402
from tests.helpers.torch_cores import N_OUTPUT, make_batch, make_core  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
SIZE = 16
# Heads, rank, values behind it. DeepSeek V3's on one GPU and on eight; heads that no power of two has.
SHAPES = [(8, 32, 16), (24, 48, 16)]
SHAPES += [] if INTERPRETED else [(128, 512, 64), (16, 512, 64)]


def limit(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 8e-3


class Latents:
    """Sequences of `lengths` in a cache with NaN where no row may look, and rows that continue them."""

    def __init__(
        self, shape: tuple[int, int, int], lengths: list[int], dtype: torch.dtype, held: str
    ) -> None:
        self.heads, self.rank, rest = shape
        self.d, self.dtype = self.rank + rest, dtype
        held_dtype = dtype if held == "as computed" else torch_dtype(held)
        self.scales = torch.tensor([[0.02], [0.02]], device=DEVICE) if held == "fp8" else None
        n, per_slot = len(lengths), (max(lengths) + 200) // SIZE + 1
        self.table = (torch.randperm(n * per_slot, device=DEVICE) + 1).view(n, per_slot).to(torch.int32)
        self.slots = torch.randperm(n, device=DEVICE)
        shape_of_cache = n * per_slot + 1, 1, SIZE, self.d
        pool = torch.full(shape_of_cache, torch.nan, device=DEVICE).to(held_dtype)
        self.cache = pool, pool  # as keys and as values
        for slot, length in zip(self.slots, lengths, strict=True):
            keys = torch.randn(length, 1, self.d, device=DEVICE).to(dtype)
            at = torch.arange(length, device=DEVICE)
            scale = None if self.scales is None else self.scales[0]
            pool[self.table[slot, at // SIZE].long(), :, at % SIZE] = rounded(keys, held_dtype, scale)
        angles = torch.randn(8000, self.d // 2, device=DEVICE)
        angles[:, : self.rank // 2] = 0  # which are not turned
        self.rotations = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)

    def store(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return rows whose keys and values the cache has."""
        qkv = torch.randn(len(slots), self.heads + 2, self.d, device=DEVICE).to(self.dtype)
        qkv[:, self.heads + 1] = qkv[:, self.heads]
        where = self.rotations, self.table, slots, positions, self.heads
        keys, values = self.cache
        return kernels.rotate_store(qkv, keys, values, self.scales, *where)

    def error(self, out: torch.Tensor, wanted: torch.Tensor) -> float:
        found, right = (x.view(len(x), self.heads, self.d)[:, :, : self.rank].float() for x in (out, wanted))
        return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("held", ["as computed", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: tuple[int, int, int], dtype: torch.dtype, held: str) -> None:
    """One sequence alone, in many shares, and several at once."""
    torch.manual_seed(shape[0])
    lengths = [0, 1, SIZE - 1, 3 * SIZE + 2, 200] + ([] if INTERPRETED else [1000, 7000])
    of = Latents(shape, lengths, dtype, held)
    positions = torch.tensor(lengths, device=DEVICE)
    qkv = of.store(of.slots, positions)
    for rows in (*(slice(i, i + 1) for i in range(len(lengths))), slice(0, len(lengths))):
        out, wanted = torch.full((2, len(qkv[rows]), of.heads * of.d), torch.nan, device=DEVICE).to(dtype)
        for module, to in ((kernels, out), (plain, wanted)):
            where = of.table, of.slots[rows], positions[rows]
            module.decode_attention(qkv[rows], *of.cache, of.scales, *where, to, of.heads, rank=of.rank)
        assert of.error(out, wanted) < limit(dtype)


@pytest.mark.parametrize("held", ["as computed", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_contexts(shape: tuple[int, int, int], dtype: torch.dtype, held: str) -> None:
    """With nothing before them, with tokens in blocks, and with these copied into rows."""
    torch.manual_seed(shape[0])
    for lengths, news in (([0] * 4, [2, 65, 150, 33]), ([5, SIZE, 100, 333], [40, 2, 17, 64])):
        of = Latents(shape, lengths, dtype, held)
        ends = [length + new for length, new in zip(lengths, news, strict=True)]
        positions = torch.cat([torch.arange(*each) for each in zip(lengths, ends, strict=True)]).to(DEVICE)
        qkv = of.store(of.slots.repeat_interleave(torch.tensor(news, device=DEVICE)), positions)
        slots, starts = of.slots.tolist(), [sum(news[:i]) for i in range(len(news))]
        firsts = [sum(ends[:i]) for i in range(len(ends))]
        copies = torch.tensor(list(zip(slots, ends, firsts, strict=True)), device=DEVICE)
        for copied in (False, True):
            out, wanted = torch.full((2, len(qkv), of.heads * of.d), torch.nan, device=DEVICE).to(dtype)
            for module, to in ((kernels, out), (plain, wanted)):
                rows, at_once = None, module.context_tile(of.heads, 1, dtype, of.rank, held == "fp8")
                if copied:
                    rows = module.copied_rows(*of.cache, of.table, copies, sum(ends), max(ends), dtype)
                tiles = [
                    [start + at, min(at_once, new - at), length + at, slot]
                    + ([0, first] if copied else [length, start])
                    for start, new, length, slot, first in zip(
                        starts, news, lengths, slots, firsts, strict=True
                    )
                    for at in range(0, new, at_once)
                ]
                module.context_attention(
                    qkv, rows, *of.cache, of.scales, of.table, torch.tensor(tiles, device=DEVICE), to,
                    of.heads, any(lengths) and not copied, rank=of.rank,
                )  # fmt: skip
            assert of.error(out, wanted) < limit(dtype)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("n_experts", "n_chosen", "groups"), [(8, 3, (4, 2)), (256, 8, (8, 4)), (6, 2, (1, 1))]
)
def test_experts_in_groups(n_experts: int, n_chosen: int, groups: tuple[int, int], normed: bool) -> None:
    torch.manual_seed(n_experts)
    for n in (0, 1, 17, 150) + (() if INTERPRETED else (3000,)):
        scores = torch.randn(n, n_experts, device=DEVICE)
        bias = torch.randn(n_experts, device=DEVICE) / 2
        for experts in (range(n_experts), range(n_experts // 2, n_experts)):
            how = n_chosen, experts, normed, groups, 2.5
            found, wanted = (module.route_grouped(scores, bias, *how) for module in (kernels, ops))
            assert torch.equal(found.ends.long(), wanted.ends.long())
            by_size = (choice.weights.sort(1).values for choice in (found, wanted))
            torch.testing.assert_close(*by_size, atol=1e-5, rtol=0)
            for a, b in zip((0, *wanted.ends.tolist()), wanted.ends.tolist(), strict=False):
                rows = (choice.order[a:b].long().sort().values // n_chosen for choice in (found, wanted))
                assert torch.equal(*rows)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_num_tokens": 24, "enable_chunked_context": True},
    SCARCE,
    {"kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.mark.skipif(INTERPRETED, reason="a whole engine")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("q_rank", [32, None])
def test_answers(tmp_path: Path, q_rank: int | None, options: dict[str, Any]) -> None:
    """In float32 they are the CPU's, otherwise most first tokens are, and no step waits for the device."""
    make_family("DeepseekV3ForCausalLM", tmp_path, q_lora_rank=q_rank)
    prompts = [[3 + token % 300 for token in prompt] for prompt in random_prompts(list(range(1, 90, 4)))]
    on_cpu = {"kv_cache_dtype": options["kv_cache_dtype"]} if options.get("kv_cache_dtype") else {}
    wanted = answer(make_core(tmp_path, dtype="float32", **on_cpu), make_batch(prompts))
    core = make_core(tmp_path, gpu_bytes=8 << 30, gpu=0, **{"dtype": "float32", **options})
    steps: Any = core.engine.worker.steps
    assert max(steps._graphs) == core.config.engine.scheduler.max_batch_size
    forward = steps.forward

    def without_waiting(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    steps.forward = without_waiting
    found = answer(core, make_batch(prompts))
    is_exact = not ({"dtype", "quantization", "kv_cache_dtype"} & set(options))
    n, least = (N_OUTPUT, len(prompts) - 1) if is_exact else (1, len(prompts) * 7 // 10)
    assert sum(a[:n] == b[:n] for a, b in zip(found, wanted, strict=True)) >= least
