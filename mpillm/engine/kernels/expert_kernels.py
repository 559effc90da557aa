"""Triton kernels of a mixture of experts: routing, products with the chosen experts' weights, and their sum.

The host never sees the choice, so that a step can be a CUDA graph. A product launches as many programs as any
choice could need; each finds its expert from counts on the device, or has nothing to do. Only the weights of
chosen experts are read. `ops` has the plain forms of `route` and `combine`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.fp8_kernels import quantize_rows
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.model.ops import Choice, Rounded

_ROUTED_ROWS = 128  # at a time


@triton.jit
def _chosen(scores, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Mark the CHOSEN largest of each row, the first among equals: int32 [ROWS, BLOCK]."""
    expert = tl.arange(0, BLOCK)[None, :]
    chosen = tl.zeros([ROWS, BLOCK], tl.int32)
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(tl.where(chosen == 1, -float("inf"), scores), 1)
        chosen = tl.where(expert == best[:, None], 1, chosen)
    return chosen


@Kernel
@triton.jit(do_not_specialize=["n"])
def _route(
    scores, weights, order, ends, n, n_experts, first, n_mine,
    NORMED: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK)
    mine = (expert >= first) & (expert < first + n_mine)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        real = (row < n)[:, None] & (expert < n_experts)[None, :]
        score = tl.load(
            scores + row[:, None] * n_experts + expert[None, :], mask=real, other=-float("inf")
        ).to(tl.float32)
        counts += tl.sum(tl.where(real & mine[None, :], _chosen(score, CHOSEN, ROWS, BLOCK), 0), 0)
    end = tl.cumsum(counts, 0)
    tl.store(ends + expert - first, end, mask=mine)
    place = end - counts  # where each expert's next pair goes
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        real = (row < n)[:, None] & (expert < n_experts)[None, :]
        score = tl.load(
            scores + row[:, None] * n_experts + expert[None, :], mask=real, other=-float("inf")
        ).to(tl.float32)
        chosen = tl.where(real, _chosen(score, CHOSEN, ROWS, BLOCK), 0)
        likely = tl.exp(score - tl.max(score, 1)[:, None])
        if NORMED:
            likely = tl.where(chosen == 1, likely, 0.0)
        weight = likely / tl.sum(likely, 1)[:, None]
        pair = row[:, None] * CHOSEN + tl.cumsum(chosen, 1) - chosen
        tl.store(weights + pair, tl.where(mine[None, :], weight, 0.0), mask=chosen == 1)
        here = tl.where(mine[None, :], chosen, 0)
        tl.store(order + place[None, :] + tl.cumsum(here, 0) - here, pair, mask=here == 1)
        place += tl.sum(here, 0)


def route(scores: Tensor, n_chosen: int, experts: range, normed: bool = True) -> Choice:
    """As `ops.route`; weights float32, `order` and `ends` int32, `order` undefined after the last end."""
    n, n_experts = scores.shape
    weights = torch.empty(n, n_chosen, dtype=torch.float32, device=scores.device)
    order = torch.empty(n * n_chosen, dtype=torch.int32, device=scores.device)
    ends = torch.empty(len(experts), dtype=torch.int32, device=scores.device)
    _route[(1,)](
        scores, weights, order, ends, n, n_experts, experts.start, len(experts),
        NORMED=normed, CHOSEN=n_chosen, ROWS=min(_ROUTED_ROWS, max(16, next_power_of_2(n))),
        BLOCK=next_power_of_2(n_experts),
    )  # fmt: skip
    return Choice(weights, order, ends)


@Kernel
@triton.jit
def _grouped_product(
    out, x, row_scales, weights, scales, biases, order, ends, n_experts, n_out, n_in,
    SCALED: tl.constexpr, BIASED: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    end = tl.load(ends + experts, mask=experts < n_experts, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < n_experts), other=0)
    n_tiles = tl.cdiv(end - start, ROWS)
    last_tile = tl.cumsum(n_tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int32))  # those before it
    if expert >= n_experts:
        return
    mine = experts == expert
    place = tl.sum(tl.where(mine, start + (tile - last_tile + n_tiles) * ROWS, 0)) + tl.arange(0, ROWS)
    real = place < tl.sum(tl.where(mine, end, 0))
    pair = tl.load(order + place, mask=real, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row, output = pair // SHARE, expert.to(tl.int64) * n_out + column
    a = weights + output[:, None] * n_in + depth[None, :]
    b = x + row[None, :] * n_in + depth[:, None]
    # Transposed: a tensor core's left operand has 64 rows at least, its right one may have few columns.
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in range(0, n_in, DEPTH):
        left = tl.load(a + at, mask=(column < n_out)[:, None] & (at + depth < n_in)[None, :], other=0.0)
        right = tl.load(b + at, mask=real[None, :] & (at + depth < n_in)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if SCALED:
        total *= tl.load(scales + output, mask=column < n_out, other=0.0)[:, None]
        total *= tl.load(row_scales + row, mask=real, other=0.0)[None, :]
    if BIASED:
        total += tl.load(biases + output, mask=column < n_out, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + pair[None, :] * n_out + column[:, None],
        total.to(out.dtype.element_ty),
        mask=real[None, :] & (column < n_out)[:, None],
    )


def tile_shape(n_pairs: int, n_experts: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return rows, columns, depth of a step, warps and pipeline stages for a program of `grouped_product`.

    `dtype` is that of the weights.
    """
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    # The fastest of six to twelve, measured on an H200 with Mixtral 8x7B's shapes (docs/explain/engine.md).
    rows = n_pairs / n_experts  # of an expert, where all are chosen equally often
    deeper = 1 if dtype == torch.bfloat16 else 2  # as many bytes
    if rows <= 8:
        return 16, 64, 128 * deeper, 4, 4
    if rows <= 32:
        return 64, 128, 64 * deeper, 4, 4
    return (128, 256, 64 * deeper, 8, 3) if rows <= 128 else (256, 128, 64 * deeper, 8, 3)


def grouped_product(
    x: Tensor | Rounded,
    weights: Tensor,
    scales: Tensor | None,
    choice: Choice,
    biases: Tensor | None = None,
) -> Tensor:
    """As `linear.GroupedLinear`: weights [experts, out, in]; undefined rows for other ranks' experts.

    biases [experts, out] are added.

    With scales (float32 [experts, out]) weights are float8_e4m3fn, and so are x's rows or will be.
    """
    n_pairs, (n_experts, n_out, n_in) = len(choice.order), weights.shape
    dtype = x.dtype
    if scales is None:
        assert isinstance(x, Tensor)
        numbers = row_scales = scales_there = x
    else:
        rounded = x if isinstance(x, Rounded) else quantize_rows(x)
        numbers, row_scales, scales_there = rounded.numbers, rounded.scales, scales
    rows, columns, depth, n_warps, n_stages = tile_shape(n_pairs, n_experts, weights.dtype)
    n_chosen = min(n_pairs, n_experts)
    n_tiles = (n_pairs - n_chosen) // rows + n_chosen  # when each expert has one row more than whole tiles
    out = torch.empty(n_pairs, n_out, dtype=dtype, device=weights.device)
    _grouped_product[(n_tiles, cdiv(n_out, columns))](
        out, numbers, row_scales, weights, scales_there, out if biases is None else biases, choice.order,
        choice.ends, n_experts, n_out, n_in,
        SCALED=scales is not None, BIASED=biases is not None, SHARE=choice.pairs_per_row(numbers),
        BLOCK=next_power_of_2(n_experts),
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    return out


@Kernel
@triton.jit
def _combine(out, y, weights, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        weight = tl.load(weights + pair)
        # Nothing was computed for another rank's expert: the memory may hold NaN.
        there = tl.where(weight == 0, 0, width)
        total += weight * tl.load(y + pair * width + column, mask=column < there, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """As `ops.combine`."""
    (n, n_chosen), width = weights.shape, y.shape[1]
    out = y.new_empty(n, width)
    _combine[(n, cdiv(width, 1024))](out, y, weights, width, CHOSEN=n_chosen, BLOCK=1024)
    return out
