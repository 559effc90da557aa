"""Triton kernels of a mixture of experts: routing, products with the chosen experts' weights, and their sum.

The host never reads the choice, so that a step can be a CUDA graph. A product launches as many programs as
any choice could need. Each program finds its expert from counts on the device, or exits. Only the weights of
chosen experts are read. `ops` has `route` and `combine` in plain PyTorch.

Weights in MXFP4 (`pack`) keep four bits up to the registers that a tensor core reads. There, about four
instructions turn two weights into bfloat16. A packed int16 has a number from each of four blocks of 32. A
shift and a mask move a number's bits to their place in bfloat16: the three lower bits become the last two of
the exponent and the first of the fraction. So every number of e2m1, even the subnormal one, is multiplied by
2^-126.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.errors import ConfigError
from mpillm.engine.kernels.fp8_kernels import quantize_rows
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.kernels.ops import ExpertChoice, RoundedRows, in_groups
from mpillm.engine.shape.entries import BLOCK
from mpillm.engine.shape.mxfp4 import BIAS, numbers_of

_MIN_ROWS, _MAX_PARTS = 16, 128  # rows of a program; programs that choose


@triton.jit
def _chosen(scores, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Mark the CHOSEN largest scores of each row, the first among equal ones: int32 [ROWS, BLOCK]."""
    expert = tl.arange(0, BLOCK)[None, :]
    chosen = tl.zeros([ROWS, BLOCK], tl.int32)
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(tl.where(chosen == 1, -float("inf"), scores), 1)
        chosen = tl.where(expert == best[:, None], 1, chosen)
    return chosen


@triton.jit
def _scores(scores, row, expert, n, n_experts):
    real = (row < n)[:, None] & (expert < n_experts)[None, :]
    at = scores + row[:, None] * n_experts + expert[None, :]
    return tl.load(at, mask=real, other=-float("inf")).to(tl.float32), real


@Kernel
@triton.jit(do_not_specialize=["n"])
def _count(
    scores, counts, n, n_experts, first, n_own,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, expert = tl.program_id(0), tl.arange(0, BLOCK)
    score, real = _scores(scores, part * ROWS + tl.arange(0, ROWS), expert, n, n_experts)
    here = real & ((expert >= first) & (expert < first + n_own))[None, :]
    count = tl.sum(tl.where(here, _chosen(score, CHOSEN, ROWS, BLOCK), 0), 0)
    tl.store(counts + part * BLOCK + expert, count)


@Kernel
@triton.jit(do_not_specialize=["n", "n_parts"])
def _route(
    scores, likelihoods, weights, order, ends, counts, n, n_experts, first, n_own, n_parts, factor,
    HAS_LIKELIHOODS: tl.constexpr, NORMED: tl.constexpr, CHOSEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part, expert = tl.program_id(0), tl.arange(0, BLOCK)
    is_own = (expert >= first) & (expert < first + n_own)
    row = part * ROWS + tl.arange(0, ROWS)
    score, real = _scores(scores, row, expert, n, n_experts)
    chosen = tl.where(real, _chosen(score, CHOSEN, ROWS, BLOCK), 0)
    here = tl.where(is_own[None, :], chosen, 0)
    if PARTS == 1:
        count = tl.sum(here, 0)
        end = tl.cumsum(count, 0)
        place = end - count  # where each expert's next pair goes
    else:
        each = tl.arange(0, PARTS)
        at = counts + each[:, None] * BLOCK + expert[None, :]
        count = tl.load(at, mask=(each < n_parts)[:, None], other=0)
        total = tl.sum(count, 0)
        end = tl.cumsum(total, 0)
        place = end - total + tl.sum(tl.where((each < part)[:, None], count, 0), 0)
    if part == 0:
        tl.store(ends + expert - first, end, mask=is_own)
    if HAS_LIKELIHOODS:
        likely, _ = _scores(likelihoods, row, expert, n, n_experts)
    else:
        likely = tl.exp(score - tl.max(score, 1)[:, None])
    if NORMED:
        likely = tl.where(chosen == 1, likely, 0.0)
    weight = likely * factor
    if NORMED or not HAS_LIKELIHOODS:
        weight = weight / tl.sum(likely, 1)[:, None]
    pair = row[:, None] * CHOSEN + tl.cumsum(chosen, 1) - chosen
    tl.store(weights + pair, tl.where(is_own[None, :], weight, 0.0), mask=chosen == 1)
    tl.store(order + place[None, :] + tl.cumsum(here, 0) - here, pair, mask=here == 1)


def route(scores: Tensor, n_chosen: int, experts: range, normed: bool = True) -> ExpertChoice:
    """Compute `ops.route`: weights float32, `order` and `ends` int32, `order` undefined after the last end.

    Each program has some rows. If there are several programs, a first kernel counts each program's choices.
    """
    return _choice(scores, None, n_chosen, experts, normed, 1.0)


def route_grouped(
    scores: Tensor,
    bias: Tensor,
    n_chosen: int,
    experts: range,
    normed: bool,
    groups: tuple[int, int],
    factor: float,
) -> ExpertChoice:
    """Compute `ops.route_grouped`, with the dtypes of `route`."""
    each, ranked = in_groups(scores, bias, groups)
    return _choice(ranked, each, n_chosen, experts, normed, factor)


def _choice(
    scores: Tensor, likelihoods: Tensor | None, n_chosen: int, experts: range, normed: bool, factor: float
) -> ExpertChoice:
    """Choose by `scores`; weigh by `likelihoods` [rows, all experts], or by the softmax of `scores`."""
    n, n_experts = scores.shape
    weights = torch.empty(n, n_chosen, dtype=torch.float32, device=scores.device)
    order = torch.empty(n * n_chosen, dtype=torch.int32, device=scores.device)
    ends = torch.empty(len(experts), dtype=torch.int32, device=scores.device)
    rows = max(_MIN_ROWS, next_power_of_2(max(1, cdiv(n, _MAX_PARTS))))
    n_parts, block = max(1, cdiv(n, rows)), next_power_of_2(n_experts)
    counts = order
    if n_parts > 1:
        counts = torch.empty(n_parts * block, dtype=torch.int32, device=scores.device)
        _count[(n_parts,)](
            scores, counts, n, n_experts, experts.start, len(experts),
            CHOSEN=n_chosen, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    _route[(n_parts,)](
        scores, scores if likelihoods is None else likelihoods, weights, order, ends, counts, n, n_experts,
        experts.start, len(experts), n_parts, factor,
        HAS_LIKELIHOODS=likelihoods is not None, NORMED=normed, CHOSEN=n_chosen,
        ROWS=rows, BLOCK=block, PARTS=next_power_of_2(n_parts),
    )  # fmt: skip
    return ExpertChoice(weights, order, ends)


@triton.jit
def _place(order, ends, n_experts, tile, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert (n_experts if there is none), its pairs, and a mask of the real pairs."""
    experts = tl.arange(0, BLOCK)
    end = tl.load(ends + experts, mask=experts < n_experts, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < n_experts), other=0)
    n_tiles = tl.cdiv(end - start, ROWS)
    last_tile = tl.cumsum(n_tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int32))  # number of experts before the tile's
    is_expert = experts == expert
    place = tl.sum(tl.where(is_expert, start + (tile - last_tile + n_tiles) * ROWS, 0)) + tl.arange(0, ROWS)
    real = place < tl.sum(tl.where(is_expert, end, 0))
    pair = tl.load(order + place, mask=real, other=0).to(tl.int64)
    return expert, pair, real


@Kernel
@triton.jit
def _grouped_product(
    out, x, row_scales, weights, scales, biases, order, ends, n_experts, n_out, n_in,
    SCALED: tl.constexpr, BIASED: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert, pair, real = _place(order, ends, n_experts, tl.program_id(0), BLOCK, ROWS)
    if expert >= n_experts:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row, output = pair // SHARE, expert.to(tl.int64) * n_out + column
    a = weights + output[:, None] * n_in + depth[None, :]
    b = x + row[None, :] * n_in + depth[:, None]
    # Transposed: a tensor core's left operand has at least 64 rows, its right operand may have few columns.
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


def _max_tiles(n_pairs: int, n_experts: int, rows: int) -> int:
    """Return the largest possible number of tiles: each chosen expert has one row more than full tiles."""
    n_chosen = min(n_pairs, n_experts)
    return (n_pairs - n_chosen) // rows + n_chosen


def tile_shape(n_pairs: int, n_experts: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return rows, columns, depth per iteration, warps, pipeline stages for a program of `grouped_product`.

    `dtype`: of the weights.
    """
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    # The fastest of six to twelve tile shapes, measured on an H200 with Mixtral 8x7B's shapes
    # (docs/explain/engine.md).
    rows = n_pairs / n_experts  # of an expert, if all are chosen equally often
    deeper = 1 if dtype == torch.bfloat16 else 2  # the same number of bytes
    if rows <= 8:
        return 16, 64, 128 * deeper, 4, 4
    if rows <= 32:
        return 64, 128, 64 * deeper, 4, 4
    return (128, 256, 64 * deeper, 8, 4) if rows <= 128 else (256, 128, 64 * deeper, 8, 3)


def grouped_product(
    x: Tensor | RoundedRows,
    weights: Tensor,
    scales: Tensor | None,
    choice: ExpertChoice,
    biases: Tensor | None = None,
) -> Tensor:
    """Multiply as `linear.GroupedLinear`: weights [experts, out, in]; biases [experts, out] are added.

    Rows for other ranks' experts are undefined.

    With scales (float32 [experts, out]), weights are float8_e4m3fn, and x's rows are rounded to that type.
    """
    n_pairs, (n_experts, n_out, n_in) = len(choice.order), weights.shape
    dtype = x.dtype
    if scales is None:
        assert isinstance(x, Tensor)
        numbers = row_scales = weight_scales = x
    else:
        rounded = x if isinstance(x, RoundedRows) else quantize_rows(x)
        numbers, row_scales, weight_scales = rounded.numbers, rounded.scales, scales
    rows, columns, depth, n_warps, n_stages = tile_shape(n_pairs, n_experts, weights.dtype)
    n_tiles = _max_tiles(n_pairs, n_experts, rows)
    out = torch.empty(n_pairs, n_out, dtype=dtype, device=weights.device)
    _grouped_product[(n_tiles, cdiv(n_out, columns))](
        out, numbers, row_scales, weights, weight_scales, out if biases is None else biases, choice.order,
        choice.ends, n_experts, n_out, n_in,
        SCALED=scales is not None, BIASED=biases is not None, SHARE=choice.pairs_per_row(numbers),
        BLOCK=next_power_of_2(n_experts),
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    return out


# --- weights in MXFP4 ---

_GROUP = 4 * BLOCK  # inputs of a packed column
# Bit positions of each of the four numbers: of its sign, and of its lowest other bit. The last number's
# lowest bit is separate, at 13, and its two other bits begin at the second position.
_PLACES = ((15, 6), (12, 3), (9, 0), (14, 10))
_LARGEST_EXPONENT = 128


def pack(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights int16 [groups of 128 inputs, out, 32] and exponents int32 [groups, out].

    Blocks [out, in / 2], exponents [out, in / 32]: see `mxfp4`. Raises ConfigError for scales above 2: their
    factor is too large for a bfloat16.
    """
    if len(exponents) and int(exponents.max()) > _LARGEST_EXPONENT:
        raise ConfigError(
            f"an expert has MXFP4 scales of {2.0 ** (int(exponents.max()) - BIAS):g}; the product on GPUs"
            " takes at most 2: use --quantization none"
        )
    numbers = torch.nn.functional.pad(numbers_of(blocks), (0, -2 * blocks.shape[1] % _GROUP)).to(torch.int32)
    each = numbers.view(len(blocks), -1, 4, BLOCK).unbind(2)
    packed = torch.zeros_like(each[0])
    for number, (sign, lowest) in zip(each[:3], _PLACES, strict=False):
        packed |= (number >> 3) << sign | (number & 7) << lowest
    sign, lowest = _PLACES[3]
    packed |= (each[3] >> 3) << sign | (each[3] >> 1 & 3) << lowest | (each[3] & 1) << 13
    # The factor of packed numbers, 2^(exponent - 1), has this exponent as a bfloat16.
    factors = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4)).to(torch.int32) + 126
    factors = factors.view(len(blocks), -1, 4)
    shifts = torch.tensor([0, 8, 16, 24], device=blocks.device)
    together = (factors.long() << shifts).sum(-1)
    together = torch.where(together >= 1 << 31, together - (1 << 32), together).to(torch.int32)
    packed = torch.where(packed >= 1 << 15, packed - (1 << 16), packed).to(torch.int16)
    return packed.transpose(0, 1).contiguous(), together.t().contiguous()


@triton.jit
def _widened(packed, first, second, third, fourth):
    """Return the four numbers of each packed int16, each times its factor, as bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, none;
        mov.b32 none, 0x80008000;
        and.b32 a, $4, 0x81C081C0;
        fma.rn.bf16x2 $0, a, $5, none;
        shl.b32 b, $4, 3;
        and.b32 b, b, 0x81C081C0;
        fma.rn.bf16x2 $1, b, $6, none;
        shl.b32 c, $4, 6;
        and.b32 c, c, 0x81C081C0;
        fma.rn.bf16x2 $2, c, $7, none;
        shl.b32 a, $4, 1;
        shr.u32 b, $4, 3;
        shr.u32 c, $4, 7;
        and.b32 a, a, 0x80008000;
        lop3.b32 a, b, 0x01800180, a, 0xEA;
        lop3.b32 a, c, 0x00400040, a, 0xEA;
        fma.rn.bf16x2 $3, a, $8, none;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r", [packed, first, second, third, fourth],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _factor(exponents, SHIFT: tl.constexpr):
    exponent = (exponents >> SHIFT) & 255
    return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@Kernel
@triton.jit
def _packed_product(
    out, x, packed_weights, exponents, biases, order, ends, n_experts, n_out, n_in,
    BIASED: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, pair, real = _place(order, ends, n_experts, tl.program_id(0), BLOCK, ROWS)
    if expert >= n_experts:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_column = column < n_out
    word, depth = tl.arange(0, 32), tl.arange(0, 128)
    first = expert.to(tl.int64) * tl.cdiv(n_in, 128) * n_out + column
    a, scale = packed_weights + first[:, None] * 32 + word[None, :], exponents + first
    b = x + (pair // SHARE)[None, :] * n_in + depth[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)  # transposed, as in `_grouped_product`
    for at in range(0, n_in, 128):
        packed = tl.load(a, mask=real_column[:, None], other=0)
        four = tl.load(scale, mask=real_column, other=0)
        right = tl.load(b + at, mask=real[None, :] & (at + depth < n_in)[:, None], other=0.0)
        w0, w1, w2, w3 = _widened(
            packed, _factor(four, 0), _factor(four, 8), _factor(four, 16), _factor(four, 24)
        )
        # The blocks in order; no number changes its register.
        left = tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (0, 2, 3, 1))
        total = tl.dot(tl.reshape(left, [COLUMNS, 128]), right, total)
        a += n_out * 32
        scale += n_out
    if BIASED:
        bias = tl.load(biases + expert.to(tl.int64) * n_out + column, mask=real_column, other=0.0)
        total += bias.to(tl.float32)[:, None]
    tl.store(
        out + pair[None, :] * n_out + column[:, None],
        total.to(out.dtype.element_ty),
        mask=real[None, :] & real_column[:, None],
    )


def packed_tile_shape(n_pairs: int, n_experts: int) -> tuple[int, int, int, int]:
    """Return rows, columns, warps and pipeline stages for a program of `packed_product`.

    The fastest of four to eight tile shapes, measured on an H200 with gpt-oss-20b's shapes.
    """
    rows = n_pairs / n_experts
    if rows <= 8:
        return 16, 64, 4, 4
    if rows <= 48:
        return 64, 128, 8, 4
    return (128, 128, 8, 3) if rows <= 512 else (256, 128, 8, 3)


def packed_product(
    x: Tensor, packed_weights: Tensor, exponents: Tensor, choice: ExpertChoice, biases: Tensor | None = None
) -> Tensor:
    """Multiply as `grouped_product`: bfloat16 x, and the stacked results of `pack` for the experts."""
    n_pairs, (n_experts, _, n_out, _), n_in = len(choice.order), packed_weights.shape, x.shape[1]
    rows, columns, n_warps, n_stages = packed_tile_shape(n_pairs, n_experts)
    out = x.new_empty(n_pairs, n_out)
    _packed_product[(_max_tiles(n_pairs, n_experts, rows), cdiv(n_out, columns))](
        out, x, packed_weights, exponents, out if biases is None else biases, choice.order, choice.ends,
        n_experts, n_out, n_in,
        BIASED=biases is not None, SHARE=choice.pairs_per_row(x), BLOCK=next_power_of_2(n_experts),
        ROWS=rows, COLUMNS=columns, num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    return out


@Kernel
@triton.jit
def _combine(out, y, weights, places, width, PLACED: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        weight = tl.load(weights + pair)
        # Rows for other ranks' experts are not computed: the memory may contain NaN.
        n_real = tl.where(weight == 0, 0, width)
        at = pair
        if PLACED:
            at = tl.load(places + pair, mask=weight != 0, other=0).to(tl.int64)
        total += weight * tl.load(y + at * width + column, mask=column < n_real, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def combine(y: Tensor, weights: Tensor, places: Tensor | None = None) -> Tensor:
    """Compute `ops.combine`. `places` (int32): the row of y for each pair, if y has another order."""
    (n, n_chosen), width = weights.shape, y.shape[1]
    out = y.new_empty(n, width)
    _combine[(n, cdiv(width, 1024))](
        out, y, weights, weights if places is None else places, width,
        PLACED=places is not None, CHOSEN=n_chosen, BLOCK=1024,
    )  # fmt: skip
    return out
