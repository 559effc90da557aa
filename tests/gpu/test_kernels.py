"""The Triton kernels against plain PyTorch, on a GPU.

They run without a GPU, slowly, with TRITON_INTERPRET=1 and Triton installed.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, get_args

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU", allow_module_level=True)

from disagg.errors import ConfigError  # noqa: E402
from mpillm.engine.cache.kv_cache import CachedBlocks, KVCache, rounded  # noqa: E402
from mpillm.engine.kernels import fp8_kernels, int4_kernels  # noqa: E402
from mpillm.engine.kernels import step_kernels as kernels  # noqa: E402
from mpillm.engine.kernels.early_starts import one_by_one  # noqa: E402
from mpillm.engine.kernels.expert_kernels import grouped_product, pack, packed_product  # noqa: E402
from mpillm.engine.kernels.few_rows import FewRows  # noqa: E402
from mpillm.engine.kernels.linear import GroupedLinear, Int4Linear, Linear  # noqa: E402
from mpillm.engine.kernels.ops import ExpertChoice, RoundedRows, UnscaledProduct  # noqa: E402
from mpillm.engine.kernels.puts import Put, TargetCache  # noqa: E402
from mpillm.engine.shape import int4  # noqa: E402
from mpillm.engine.shape.composition import Activation  # noqa: E402
from mpillm.engine.shape.dtypes import torch_dtype  # noqa: E402
from mpillm.engine.shape.mxfp4 import widened  # noqa: E402
from mpillm.engine.tensors.graphs import capture  # noqa: E402
from mpillm.engine.tensors.rounding import dequantize_rows, quantize_rows  # noqa: E402
from mpillm.engine.tensors.staging import Staging  # noqa: E402
from tests.helpers import plain_kernels as plain  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
needs_assembly = pytest.mark.skipif(INTERPRETED, reason="has assembly")


def error(out: torch.Tensor | RoundedRows, wanted: torch.Tensor | RoundedRows) -> float:
    assert isinstance(out, torch.Tensor) and isinstance(wanted, torch.Tensor)
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def limit(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 8e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_between_the_products(dtype: torch.dtype) -> None:
    for n, width in ((1, 64), (3, 576), (5, 4096), (140, 576)):
        x, delta = torch.randn(2, n, width, device=DEVICE).to(dtype)
        weight = torch.randn(width, device=DEVICE).to(dtype)
        x2 = x.clone()
        assert error(kernels.add_norm(x, None, weight, 1e-5), plain.add_norm(x2, None, weight, 1e-5)) < limit(
            dtype
        )
        assert error(
            kernels.add_norm(x, delta, weight, 1e-5), plain.add_norm(x2, delta, weight, 1e-5)
        ) < limit(dtype)
        assert torch.equal(x, x2)
        gate_up = torch.randn(n, 2 * width, device=DEVICE).to(dtype)
        for activation in get_args(Activation):
            found = kernels.gated(4 * gate_up, activation=activation)
            assert error(found, plain.gated(4 * gate_up, activation=activation)) < limit(dtype)
        for in_fp8, floats in (
            (kernels.add_norm(x, delta, weight, 1e-5, True), kernels.add_norm(x2, delta, weight, 1e-5)),
            (kernels.gated(gate_up, True), kernels.gated(gate_up)),
        ):
            assert isinstance(in_fp8, RoundedRows) and isinstance(floats, torch.Tensor)
            wanted = fp8_kernels.quantize_rows(floats)
            assert in_fp8.dtype == dtype
            torch.testing.assert_close(in_fp8.scales, wanted.scales, atol=0, rtol=1e-6)
            # Two kernels may differ in a value's last bit, and then in what it is rounded to.
            differing = (in_fp8.numbers.float() != wanted.numbers.float()).float().mean()
            assert differing < (1e-4 if dtype == torch.bfloat16 else 2e-3)
        assert torch.equal(x, x2)
    table = torch.randn(50, 576, device=DEVICE).to(dtype)
    tokens = torch.tensor([-1, 10, 59, 60, 9, -1], device=DEVICE)
    slots = torch.tensor([2, 0, 0, 0, 0, 1], device=DEVICE)
    last = torch.tensor([0, 5, 33], device=DEVICE)
    assert torch.equal(
        kernels.embed(table, tokens, slots, last, 10), plain.embed(table, tokens, slots, last, 10)
    )


def new_product(n: int, width: int, dtype: torch.dtype) -> tuple[UnscaledProduct, torch.Tensor]:
    """Return a product before its scales, and with them."""
    numbers = (100 * torch.randn(n, width, device=DEVICE)).to(dtype)
    row_scales = torch.rand(n, 1, device=DEVICE) + 0.01
    scales = torch.rand(1, width, device=DEVICE) / 100
    return UnscaledProduct(numbers, row_scales, scales), (numbers.float() * row_scales * scales).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_without_their_scales(dtype: torch.dtype) -> None:
    for n, width in ((1, 64), (3, 576), (70, 4096)):
        product, whole = new_product(n, width, dtype)
        assert error(kernels.scaled(product), whole) < limit(dtype)
        x, weight = (
            torch.randn(n, width, device=DEVICE).to(dtype),
            torch.randn(width, device=DEVICE).to(dtype),
        )
        x2 = x.clone()
        found, wanted = (
            kernels.add_norm(x, product, weight, 1e-5), plain.add_norm(x2, whole, weight, 1e-5),
        )  # fmt: skip
        assert error(found, wanted) < limit(dtype) and error(x, x2) < limit(dtype)
        assert error(kernels.gated(product), plain.gated(whole.clone())) < limit(dtype)
        rows, rows_too = kernels.gated(product, True), kernels.gated(whole, True)
        assert isinstance(rows, RoundedRows) and isinstance(rows_too, RoundedRows)
        assert error(rows.scales, rows_too.scales) < limit(dtype)
    heads, kv_heads, d, size, n = 6, 2, 64, 16, 5
    product, whole = new_product(n, (heads + 2 * kv_heads) * d, dtype)
    shape = n, heads + 2 * kv_heads, d
    ours, theirs = torch.zeros(2, 2, n + 1, kv_heads, size, d, device=DEVICE).to(dtype)
    rotations = torch.randn(100, d, device=DEVICE)
    slots, positions = torch.arange(n, device=DEVICE), torch.arange(n, device=DEVICE) + 3
    where = rotations, torch.arange(1, n + 1, device=DEVICE).to(torch.int32)[:, None], slots, positions, heads
    found = kernels.rotate_store(
        product._replace(numbers=product.numbers.view(shape)), ours[0], ours[1], None, *where
    )
    wanted = plain.rotate_store(whole.view(shape), theirs[0], theirs[1], None, *where)
    assert error(found[:, :heads], wanted[:, :heads]) < limit(dtype)
    assert error(ours, theirs) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_fp8(dtype: torch.dtype) -> None:
    """The bits are PyTorch's, except where a quotient lies within a rounding error of the middle between two
    numbers."""
    for n, width in ((1, 64), (3, 576), (70, 4096), (5, 14336)):
        x = (torch.randn(n, width, device=DEVICE) * torch.logspace(-4, 4, n, device=DEVICE)[:, None]).to(
            dtype
        )
        x[n // 2] = 0
        (rows, scales, _), (rows_too, scales_too) = fp8_kernels.quantize_rows(x), quantize_rows(x, "fp8")
        assert rows.dtype == torch.float8_e4m3fn and scales.shape == (n, 1)
        torch.testing.assert_close(scales, scales_too, atol=0, rtol=1e-6)
        differing = rows.float() != rows_too.float()
        # Triton's interpreter loses the carry where a number is rounded up to a power of two.
        assert differing.float().mean() < (0.04 if INTERPRETED else 1e-3)
        assert not differing[n // 2].any()


@needs_assembly
def test_every_fp8_number() -> None:
    """Each number, subnormal ones too, stays itself when it is multiplied by one, also by a split sum."""
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]  # what is no number
    weight = codes.repeat(16, 32).view(torch.float8_e4m3fn)
    product = FewRows(weight, torch.ones(16, device=DEVICE))
    for start in range(0, 254, 8):
        x = torch.zeros(8, weight.shape[1], device=DEVICE)
        n = min(8, 254 - start)
        x[torch.arange(n), 254 * 13 + start + torch.arange(n)] = 1
        found = product(x)
        assert torch.equal(found[:n, 3], codes[start : start + n].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("quantization", ["none", pytest.param("fp8", marks=needs_assembly)])
def test_few_rows_with_what_follows(quantization: str) -> None:
    """SiLU and the residual are as in kernels of their own, time after time, for shapes that no tile fits."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    torch.manual_seed(0)
    for n_out, n_in in (
        ((12288, 4096), (96, 80), (1056, 4112), (16, 2064)) if not INTERPRETED else ((96, 160),)
    ):
        weight, scales = torch.randn(n_out, n_in, device=DEVICE), None
        weight = weight / n_in**0.5
        if quantization == "fp8":
            weight, scales = quantize_rows(weight, "fp8")
            floats = dequantize_rows(weight, scales, torch.float32)
        else:
            weight = weight.to(dtype)
            floats = weight.float()
        few = FewRows(weight, scales)
        for n in sorted({1, 3, few.max_rows, min(17, few.max_fused_rows), few.max_fused_rows}):
            x, residual = torch.randn(n, n_in, device=DEVICE).to(dtype), torch.randn(n, n_out, device=DEVICE)
            product = x.float() @ floats.T
            assert error(few(x), product) < limit(dtype)
            assert error(few(x, activated=True), plain.gated(product.clone())) < limit(dtype)
            sums = [few(x, residual=residual.to(dtype, copy=True)) for _ in range(3)]
            assert error(sums[0], residual + product) < limit(dtype)
            assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


@pytest.mark.skipif(INTERPRETED, reason="one kernel after the other")
@pytest.mark.parametrize("n", [1, 8])
def test_kernels_that_start_early_wait_for_each_other(n: int) -> None:
    """A chain of them gives what it gives one by one, bit by bit, launched and as a graph."""
    width, hidden = 1024, 4096
    gate_up = FewRows(*quantize_rows(torch.randn(2 * hidden, width, device=DEVICE) / 32, "fp8"))
    down = FewRows(*quantize_rows(torch.randn(width, hidden, device=DEVICE) / 64, "fp8"))
    norm, start = torch.ones(width, device=DEVICE).bfloat16(), torch.randn(n, width, device=DEVICE).bfloat16()

    def chain() -> torch.Tensor:
        x = start.clone()
        for _ in range(50):
            normed = kernels.add_norm(x, None, norm, 1e-5)
            assert isinstance(normed, torch.Tensor)
            down(gate_up(normed, activated=True), residual=x)
        return x

    launched = chain()
    graph, replayed = capture(chain)
    for _ in range(3):
        graph.replay()
    with one_by_one():
        expected = chain()
    assert expected.isfinite().all() and not torch.equal(expected, start)
    assert torch.equal(launched, expected) and torch.equal(replayed, expected)


SHAPES = [(32, 8, 128, 32), (9, 3, 64, 16), (8, 4, 16, 8), (4, 4, 80, 64), (8, 1, 128, 32)]
# Each is compiled anew, seconds each: windows and sinks with two of the shapes.
ATTENTION = [(*shape, 0, False) for shape in SHAPES] + [
    (*shape, window, has_sinks)
    for shape in SHAPES[:2]
    for window, has_sinks in ((21, False), (0, True), (128, True))
]


@pytest.mark.parametrize("held", ["as computed", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d", "size", "window", "has_sinks"), ATTENTION)
def test_attention(
    heads: int,
    kv_heads: int,
    d: int,
    size: int,
    dtype: torch.dtype,
    held: str,
    window: int,
    has_sinks: bool,
) -> None:
    """Attention is right for contexts of many lengths, scattered blocks, NaN where no row may look, caches of
    every type, windows and sinks."""
    torch.manual_seed(heads)
    kind = window, torch.randn(heads, device=DEVICE) * 3 if has_sinks else None
    held_dtype = dtype if held == "as computed" else torch_dtype(held)
    # the largest are cut off
    scales = torch.rand(2, kv_heads, device=DEVICE) / 50 + 0.002 if held == "fp8" else None
    lengths = (
        [0, 1, 5, size - 1, size, 3 * size + 2, 200]
        if INTERPRETED
        else [0, 1, 5, size - 1, size, 3 * size + 2, 200, 1000, 3333]
    )
    n, per_slot = len(lengths), (max(lengths) + 70) // size + 1
    blocks = torch.randperm(n * per_slot, device=DEVICE) + 1
    table = blocks.view(n, per_slot).to(torch.int32)
    slots = torch.randperm(n, device=DEVICE)
    ours = torch.full((2, n * per_slot + 1, kv_heads, size, d), torch.nan, device=DEVICE).to(held_dtype)
    for i, length in enumerate(lengths):
        for j in range(length):
            for pool, some in zip(ours, [None, None] if scales is None else scales, strict=True):
                pool[table[slots[i], j // size], :, j % size] = rounded(
                    torch.randn(kv_heads, d, device=DEVICE).to(dtype), held_dtype, some
                )
    theirs = ours.clone()
    angles = torch.randn(5000, d // 2, device=DEVICE)
    rotations = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)

    positions = torch.tensor(lengths, device=DEVICE)
    qkv = torch.randn(n, heads + 2 * kv_heads, d, device=DEVICE).to(dtype)
    qkv2 = qkv.clone()
    kernels.rotate_store(qkv, ours[0], ours[1], scales, rotations, table, slots, positions, heads)
    plain.rotate_store(qkv2, theirs[0], theirs[1], scales, rotations, table, slots, positions, heads)
    assert error(qkv[:, :heads], qkv2[:, :heads]) < limit(dtype)
    stored, wanted = ours.float(), theirs.float()
    assert torch.equal(stored.isnan(), wanted.isnan())
    if held_dtype == dtype:
        assert error(stored.nan_to_num(), wanted.nan_to_num()) < limit(dtype)
    else:  # a last bit of what is rounded may make it another number
        # Triton's interpreter loses the carry where a number is rounded up to a power of two.
        new = ~(stored == 0) & ~stored.isnan() if INTERPRETED else ~stored.isnan()
        assert float((stored != wanted)[new].float().mean()) < (0.04 if INTERPRETED else 5e-3)
        ours = theirs.clone()
    out, wanted = torch.full((2, n, heads * d), torch.nan, device=DEVICE).to(dtype)
    for few in (1, n):  # one sequence alone is split into many parts
        for which in range(n - few + 1):
            rows = slice(which, which + few)
            arguments = table, slots[rows], positions[rows]
            for module, to in ((kernels, out), (plain, wanted)):
                module.decode_attention(
                    qkv[rows], ours[0], ours[1], scales, *arguments, to[rows], heads, *kind
                )
            assert error(out[rows], wanted[rows]) < limit(dtype)
    # Rows may be of one sequence: its last token, and guesses.
    counts = [length % 3 + 1 for length in lengths]
    positions = torch.cat([torch.arange(i + 1 - n, i + 1) for i, n in zip(lengths, counts, strict=True)])
    positions, row_slots = positions.to(DEVICE), slots.repeat_interleave(torch.tensor(counts, device=DEVICE))
    qkv = torch.randn(len(positions), heads + 2 * kv_heads, d, device=DEVICE).to(dtype)
    out, wanted = torch.full((2, len(positions), heads * d), torch.nan, device=DEVICE).to(dtype)
    for module, to in ((kernels, out), (plain, wanted)):
        module.decode_attention(
            qkv, theirs[0], theirs[1], scales, table, row_slots, positions, to, heads, *kind
        )
    assert error(out, wanted) < limit(dtype)

    some = [2, 3, 17, 40, 64, 5, 33]
    after = some[:n] + [2] * max(0, n - len(some)), [length + 1 for length in lengths]
    for news, n_cached in (after, ([2, 65, 150, 33], [0] * 4)):
        m = len(news)
        starts = [sum(news[:i]) for i in range(m)]
        positions = torch.cat(
            [torch.arange(held, held + new) for held, new in zip(n_cached, news, strict=True)]
        ).to(DEVICE)
        row_slots = torch.repeat_interleave(slots[:m], torch.tensor(news, device=DEVICE))
        qkv = torch.randn(sum(news), heads + 2 * kv_heads, d, device=DEVICE).to(dtype)
        if not all((held + new - 1) // size < per_slot for held, new in zip(n_cached, news, strict=True)):
            raise AssertionError("the table is too small")
        kernels.rotate_store(qkv, ours[0], ours[1], scales, rotations, table, row_slots, positions, heads)
        out, wanted = torch.full((2, sum(news), heads * d), torch.nan, device=DEVICE).to(dtype)
        ends = [held + new for held, new in zip(n_cached, news, strict=True)]
        firsts = [sum(ends[:i]) for i in range(m)]
        copies = torch.tensor(list(zip(slots.tolist(), ends, firsts, strict=False)), device=DEVICE)
        for copied in (False, True):
            copied_to = []
            for module, to in ((kernels, out), (plain, wanted)):
                keys_of = None
                if copied:
                    keys_of = module.copied_rows(
                        ours[0], ours[1], table, copies, sum(ends), max(ends), qkv.dtype
                    )
                    copied_to.append(keys_of)
                at_once = module.context_tile(heads, kv_heads, dtype)
                tiles = [
                    [start + at, min(at_once, new - at), held + at, slot]
                    + ([0, first] if copied else [held, start])
                    for start, new, held, slot, first in zip(
                        starts, news, n_cached, slots.tolist(), firsts, strict=False
                    )
                    for at in range(0, new, at_once)
                ]
                to.fill_(torch.nan)
                module.context_attention(
                    qkv, keys_of, ours[0], ours[1], scales, table, torch.tensor(tiles, device=DEVICE), to,
                    heads, any(n_cached) and not copied, *kind,
                )  # fmt: skip
            assert not copied or torch.equal(*copied_to)
            assert error(out, wanted) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_long_contexts_have_more_shares(dtype: torch.dtype) -> None:
    """A short context in the same table has as many shares as ever."""
    heads, kv_heads, d, size, longest = 8, 2, 64, 64, 4700 if INTERPRETED else 20_000
    per_slot = max(longest, 8192) // size + 1
    keys, values = torch.randn(2, per_slot + 1, kv_heads, size, d, device=DEVICE).to(dtype)
    table = (torch.randperm(per_slot, device=DEVICE) + 1).to(torch.int32)[None]
    slots, qkv = (
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.randn(1, heads + 2 * kv_heads, d, device=DEVICE).to(dtype),
    )
    for length in (longest, 4353, 130, 1):
        positions = torch.tensor([length - 1], device=DEVICE)
        out, wanted = torch.full((2, 1, heads * d), torch.nan, device=DEVICE).to(dtype)
        for module, to in ((kernels, out), (plain, wanted)):
            module.decode_attention(qkv, keys, values, None, table, slots, positions, to, heads)
        assert error(out, wanted) < limit(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_pieces_of_a_handoff(dtype: torch.dtype) -> None:
    """Pieces go out of blocks and into others as on the CPU, and nothing else is written."""
    for size, dim, n_tokens in ((4, 16, 1), (4, 16, 8), (4, 16, 11), (32, 128, 65), (32, 80, 64)):
        caches = [KVCache(5, 9, 3, size, dim, dtype, device) for device in ("cpu", DEVICE)]
        for pool in (caches[0].keys, caches[0].values):
            pool.copy_(torch.randn(pool.shape))
        for name in ("keys", "values"):
            getattr(caches[1], name).copy_(getattr(caches[0], name))
        for layers, heads in ((slice(0, 5), slice(0, 3)), (slice(2, 4), slice(1, 3))):
            there = [CachedBlocks([7, 2, 5], n_tokens), CachedBlocks([8, 3], 1)]
            here = [CachedBlocks([1, 9, 4], n_tokens), CachedBlocks([6], 1)]
            pieces = [cache.read(there, layers, heads) for cache in caches]
            for a, b in zip(*pieces, strict=True):
                assert torch.equal(a, b.cpu())
            for cache, some in zip(caches, pieces, strict=True):
                cache.write(here, layers, heads, some)
            for name in ("keys", "values"):
                assert torch.equal(*(getattr(cache, name).cpu().view(torch.uint8) for cache in caches))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_parts_of_a_cache_are_put_into_blocks_of_another(dtype: torch.dtype) -> None:
    """They go into blocks of another size, among other layers and heads, and nothing else is written."""
    for size, size_there, dim in ((4, 8, 16), (8, 4, 80), (32, 32, 128), (12, 8, 64)):
        source = KVCache(5, 9, 3, size, dim, dtype, DEVICE)
        dests = [KVCache(4, 12, 2, size_there, dim, dtype, DEVICE) for _ in range(2)]
        for cache in (source, *dests):
            for pool in (cache.keys, cache.values):
                pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(len(pool))))
        puts = [
            Put(2 * size + 1, [7, 2, 5], list(range(1, 7)), 2, 1, 1, 0),
            Put(1, [8], [9], 1, 2, 0, 1),
            Put(size, [3, 4], list(range(8, 12)), 0, 0, 2, 1),
            Put(size + 1, [4, 6], list(range(8, 12)), 0, 0, 0, 0, first=size),
        ]
        _, n_blocks, n_heads, tokens, _ = dests[0].keys.shape
        there = TargetCache(dests[0].keys.data_ptr(), dests[0].values.data_ptr(), n_blocks, n_heads, tokens)
        source.put(puts, there, 2, 1, Staging(torch.device(DEVICE)))
        for put in puts:
            for layer, token in itertools.product(range(2), range(put.first, put.n_tokens)):
                for a, b in ((source.keys, dests[1].keys), (source.values, dests[1].values)):
                    moved = a[put.layer + layer, put.blocks[token // size], put.head, token % size]
                    block = put.target_blocks[token // size_there]
                    b[put.target_layer + layer, block, put.target_head, token % size_there] = moved
        for name in ("keys", "values"):
            assert torch.equal(*(getattr(cache, name).cpu().view(torch.uint8) for cache in dests))


SIZES = [(0, 64, 48), (1, 64, 48), (3, 80, 33), (17, 130, 64), (140, 40, 17)]
SIZES += [] if INTERPRETED else [(48, 512, 256), (150, 512, 256), (300, 512, 256), (3000, 512, 264)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_experts", "n_chosen", "experts", "normed"),
    [
        (8, 2, range(8), True),
        (8, 2, range(4, 6), False),
        (5, 3, range(2), True),
        (2, 2, range(1), True),
        (128, 4, range(64, 128), False),
    ],
)
def test_experts(n_experts: int, n_chosen: int, experts: range, normed: bool, dtype: torch.dtype) -> None:
    """Products are right for any number of rows, with an expert that no row chooses, and with all or no rows
    on one rank."""
    torch.manual_seed(n_experts)
    for n, width, inner in SIZES:
        scores = torch.rand(n, n_experts, device=DEVICE).argsort(1).to(dtype) / 2  # no two alike in a row
        for unpopular in (None, experts.start):
            if unpopular is not None:
                scores[:, unpopular] = -20
            found, wanted = (m.route(scores, n_chosen, experts, normed) for m in (kernels, plain))
            assert torch.equal(found.ends.long(), wanted.ends.long())
            by_size = (choice.weights.float().sort(1).values for choice in (found, wanted))
            torch.testing.assert_close(*by_size, atol=limit(dtype), rtol=0)
            x = torch.randn(n, width, device=DEVICE).to(dtype)
            up, down = (
                torch.randn(len(experts), *shape, device=DEVICE).to(dtype) / 8
                for shape in ((inner, width), (width, inner))
            )
            up_bias, down_bias = (torch.randn(w.shape[:2], device=DEVICE).to(dtype) for w in (up, down))
            hidden = grouped_product(x, up, None, found, up_bias)
            out = kernels.combine(grouped_product(hidden, down, None, found, down_bias), found.weights)
            hidden = by_expert(x, up, wanted, up_bias)
            expected = plain.combine(by_expert(hidden, down, wanted, down_bias), wanted.weights)
            assert out.shape == x.shape
            assert torch.equal(out.any(1), expected.any(1))  # zeros where all chosen experts are other ranks'
            assert not expected.any() or error(out, expected) < 2 * limit(dtype)


@pytest.mark.parametrize(("n_experts", "n_chosen", "experts"), [(8, 2, range(8)), (5, 3, range(2))])
def test_experts_with_fp8_weights(n_experts: int, n_chosen: int, experts: range) -> None:
    torch.manual_seed(n_experts)
    for n, width, inner in SIZES[1:]:
        scores = torch.randn(n, n_experts, device=DEVICE)
        choice = kernels.route(scores, n_chosen, experts)
        x = (torch.randn(n, width) * torch.logspace(-2, 2, n)[:, None]).to(DEVICE, torch.bfloat16)
        each = [quantize_rows(torch.randn(inner, width) * torch.rand(inner, 1), "fp8") for _ in experts]
        weights, scales = (torch.stack(parts).to(DEVICE) for parts in zip(*each, strict=True))
        scales = scales[..., 0].contiguous()
        rows = RoundedRows(*quantize_rows(x, "fp8"), x.dtype)
        found = grouped_product(rows, weights, scales, choice)
        seen = dequantize_rows(rows.numbers, rows.scales, torch.float32)
        wanted = by_expert(
            seen, torch.stack([dequantize_rows(*one, torch.float32) for one in each]), choice
        ).cpu()
        mine = choice.order[: int(choice.ends[-1])].long().cpu()
        errors = (found.float().cpu() - wanted)[mine].norm(dim=1) / wanted[mine].norm(dim=1)
        # Tensor cores sum products of fp8 numbers with fewer bits than float32 has.
        assert found.dtype == torch.bfloat16 and float(errors.max()) < 1e-2
        rounded_there = grouped_product(fp8_kernels.quantize_rows(x), weights, scales, choice)
        assert torch.equal(grouped_product(x, weights, scales, choice)[mine], rounded_there[mine])


@needs_assembly
@pytest.mark.parametrize(("n_out", "n_in"), [(48, 128), (70, 384), (512, 4096), (14336, 512)])
def test_weights_in_int4(n_out: int, n_in: int) -> None:
    """Numbers, zeros and scales are exact; products, also with what follows, are those of floats."""
    random = torch.Generator().manual_seed(n_out)
    blocks = torch.randint(256, (n_out, n_in // 2), dtype=torch.uint8, generator=random)
    zeros = torch.randint(17, (n_out, n_in // 128), generator=random)
    scales = torch.stack([torch.rand(zeros.shape, generator=random) / 64, zeros], dim=-1).half()
    wide = int4.widened(blocks, scales).to(DEVICE)
    product = Int4Linear(blocks.to(DEVICE), scales.to(DEVICE), torch.bfloat16)
    assert torch.equal(int4_kernels.widened(product._weight, product._scales), wide.to(torch.bfloat16))
    for n in (1, 3, 8, 16, 17, 64, 65, 128, 129, 300):
        x = torch.randn(n, n_in, generator=random).to(DEVICE, torch.bfloat16)
        wanted = x.float() @ wide.T
        assert error(product(x), wanted) < 8e-3
        if (few := product.few(n)) is not None:
            residual = torch.randn(n, n_out, generator=random).to(DEVICE, torch.bfloat16)
            assert error(few(x, residual=residual.clone()), residual.float() + wanted) < 8e-3
            gate, up = wanted.chunk(2, dim=1)
            assert error(few(x, activated=True), torch.nn.functional.silu(gate) * up) < 2e-2
        else:
            assert n > 128


@needs_assembly
@pytest.mark.parametrize(("n_experts", "n_chosen", "experts"), [(8, 2, range(8)), (5, 3, range(2))])
def test_experts_in_mxfp4(n_experts: int, n_chosen: int, experts: range) -> None:
    """A weight has the bits of the widened one, as the product of a row with a single 1 shows."""
    torch.manual_seed(n_experts)
    for n, width, inner in (
        (1, 64, 48),
        (3, 96, 33),
        (17, 160, 64),
        (140, 2880, 40),
        (300, 512, 256),
        (9000, 64, 80),
    ):
        choice = kernels.route(torch.randn(n, n_experts, device=DEVICE), n_chosen, experts)
        blocks = torch.randint(256, (len(experts), inner, width // 2), dtype=torch.uint8, device=DEVICE)
        exponents = torch.randint(
            0, 129, (len(experts), inner, width // 32), dtype=torch.uint8, device=DEVICE
        )
        each = [widened(*one).to(torch.bfloat16) for one in zip(blocks, exponents, strict=True)]
        wide, biases = torch.stack(each), torch.randn(len(experts), inner, device=DEVICE).to(torch.bfloat16)
        packed = [torch.stack(parts) for parts in zip(*map(pack, blocks, exponents), strict=True)]
        products: Any = (packed_product, packed), (grouped_product, (wide, None))
        mine = choice.order[: int(choice.ends[-1])].long()
        one_hot = torch.zeros(n, width, dtype=torch.bfloat16, device=DEVICE)
        one_hot[torch.arange(n), torch.randint(width, (n,))] = 1
        for x, most, added in ((one_hot, 0.0, None), (torch.randn(n, width, device=DEVICE), 8e-3, biases)):
            x = x.to(torch.bfloat16)
            found, wanted = (
                product(x, *weights, choice, added)[mine].float() for product, weights in products
            )
            assert error(found, wanted) <= most if most else torch.equal(found, wanted)
    with pytest.raises(ConfigError, match="MXFP4 scales of 4; the product on GPUs takes at most 2"):
        pack(blocks[0], torch.full_like(exponents[0], 129))


def by_expert(
    x: torch.Tensor, weights: torch.Tensor, choice: ExpertChoice, biases: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what `GroupedLinear` does on a CPU."""
    linear = GroupedLinear(
        [Linear(weight.cpu().float()) for weight in weights],
        None if biases is None else list(biases.cpu().float()),
    )
    order, ends = (places.cpu().long() for places in (choice.order, choice.ends))  # GPUs have int32
    # A GPU leaves the order of other ranks' pairs undefined. A CPU writes zeros there.
    local = order[: int(ends[-1])]
    is_local = torch.zeros(len(order), dtype=torch.bool).index_fill(0, local, True)
    order = torch.cat([local, (~is_local).nonzero()[:, 0]])
    return linear(x.cpu().float(), ExpertChoice(choice.weights.cpu(), order, ends)).to(x)
