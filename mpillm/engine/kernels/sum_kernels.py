"""A sum over the GPUs of a TP group, its residual and its norm, in one Triton kernel over NVLink.

For few rows, each rank writes its part to the buffers of the other ranks. Then each rank adds all parts, in
rank order, so that all ranks have the same sum. Each 16-bit number shares an int32 with the turn (the number
of the sum), and a reader polls these int32 numbers. They double the bytes and save a round trip (as in NCCL's
protocol LL). A row has two places in a buffer, which alternate. A rank writes to a place again only after it
has received the next row from all ranks, which have then read the place.

For more rows, each rank owns every `RANKS`th row. The other ranks write their parts of the row to the owner's
buffer. The owner adds them, computes the norm and, before a product with fp8 weights, rounds the result to
half the bytes. Then it writes the result to the buffers of the other ranks (a reduce-scatter and an
all-gather). So a rank's residual is correct only in its own rows (`SharedRows.own`). A program processes the
same rows on all ranks. It waits only for the same program on other ranks: before it reads parts, and before
it reads results. So a row needs only one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.fp8_kernels import load_scaled, new_rounded, parts_of, scaled_down, store_rounded
from mpillm.engine.kernels.launch import Kernel, cdiv, next_power_of_2
from mpillm.engine.kernels.ops import RoundedRows, UnscaledProduct
from mpillm.engine.parallel.shared_rows import FEW_ROWS, PROGRAMS, SharedRows

_MAX_POLLS = tl.constexpr(1 << 28)  # some minutes
_LARGEST = tl.constexpr(448.0)  # largest fp8 number


@triton.jit
def _end_if_lost(polls):
    """Stop with a CUDA error if another rank has not written after `_MAX_POLLS` polls."""
    if polls == _MAX_POLLS:
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _place(buffer, turn, row, n_rows, width):
    """Return the address of a row of this turn in `buffer`, [2, n_rows, width]."""
    return tl.multiple_of(buffer + ((turn & 1) * n_rows + row).to(tl.int64) * width, 16)


@triton.jit
def _sum_flagged(
    put, row, turn, addresses, rank, width, column, real,
    FLAGS: tl.constexpr, FEW_ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Send `put`, a row of 16-bit floats, each in an int32 with the turn; return all ranks' sum."""
    own = (turn << 16) | (put.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    for other in tl.static_range(RANKS):
        if other != rank:
            buffer = tl.load(addresses + other).to(tl.pointer_type(tl.int32)) + FLAGS
            tl.store(
                _place(buffer, turn, rank * FEW_ROWS + row, RANKS * FEW_ROWS, width) + column, own, mask=real
            )
    total = tl.zeros(put.shape, tl.float32)
    buffer = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + FLAGS
    for other in tl.static_range(RANKS):
        got = own
        if other != rank:
            place = _place(buffer, turn, other * FEW_ROWS + row, RANKS * FEW_ROWS, width) + column
            got = tl.load(place, mask=real, other=own, volatile=True)
            polls = 0
            while (tl.max(((got ^ own) >> 16) & 0xFFFF) != 0) & (polls < _MAX_POLLS):
                got = tl.load(place, mask=real, other=own, volatile=True)
                polls += 1
            _end_if_lost(polls)
        total += got.to(tl.int16).to(put.dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _meet(addresses, turn, program, rank, RANKS: tl.constexpr):
    """Set this program's flag on all other ranks, after its writes, and wait for their flags."""
    tl.debug_barrier()  # every thread has stored before one sets the flag
    for other in tl.static_range(RANKS):
        if other != rank:
            flags = tl.load(addresses + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + program * RANKS + rank, turn, sem="release", scope="sys")
    flags = tl.load(addresses + rank).to(tl.pointer_type(tl.int32))
    for other in tl.static_range(RANKS):
        if other != rank:
            flag = flags + program * RANKS + other
            reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            polls = 0
            while (reached - turn < 0) & (polls < _MAX_POLLS):  # correct even when int32 wraps
                reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                polls += 1
            _end_if_lost(polls)
    tl.debug_barrier()


@triton.jit
def _added_norm(x, total, weights, row, width, eps, column, real):
    """Add `total` to a row of x, and return its norm (float32)."""
    at = row.to(tl.int64) * width
    value = tl.load(x + at + column, mask=real, other=0.0).to(tl.float32)
    value = (value + total.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
    tl.store(x + at + column, value, mask=real)
    value = value.to(tl.float32)
    return (value * tl.rsqrt(tl.sum(value * value) / width + eps) * weights).to(x.dtype.element_ty)


@Kernel
@triton.jit(do_not_specialize=["rank", "n"])
def _sum_add_norm(
    out, scales, x, part, row_scales, column_scales, weight, addresses, turns, rank, n_rows, n, width, eps,
    UNSCALED: tl.constexpr, ROUNDS: tl.constexpr, FEW: tl.constexpr, FEW_ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < width
    turn = tl.load(turns + program) + 1
    weights = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    flags: tl.constexpr = PROGRAMS * RANKS
    if FEW:
        value = load_scaled(
            part, row_scales, column_scales, program.to(tl.int64), width, column, real, UNSCALED
        )
        put = value.to(x.dtype.element_ty)
        total = _sum_flagged(put, program, turn, addresses, rank, width, column, real, flags, FEW_ROWS, RANKS)
        normed = _added_norm(x, total, weights, program, width, eps, column, real)
        if ROUNDS:
            store_rounded(out, scales, program.to(tl.int64), width, column, normed.to(tl.float32), _LARGEST)
        else:
            tl.store(out + program.to(tl.int64) * width + column, normed, mask=real)
    else:
        parts_at = 4 * (flags + 2 * RANKS * FEW_ROWS * width)  # bytes
        results_at = parts_at + n_rows * width * (x.dtype.element_ty.primitive_bitwidth // 8)
        scales_at = results_at + n_rows * width * (x.dtype.element_ty.primitive_bitwidth // 8)
        own = tl.load(addresses + rank)
        n_rounds = tl.cdiv(tl.cdiv(n, RANKS) - program, PROGRAMS)
        for i in range(n_rounds):
            place = program + i * PROGRAMS
            for other in tl.static_range(RANKS):
                row = (place * RANKS + other).to(tl.int64)
                if other != rank:
                    in_row = column < tl.where(row < n, width, 0)
                    value = load_scaled(
                        part,
                        row_scales,
                        column_scales,
                        tl.minimum(row, n - 1),
                        width,
                        column,
                        in_row,
                        UNSCALED,
                    )
                    parts = (tl.load(addresses + other) + parts_at).to(x.dtype)
                    at = _row_of(parts, rank * (n_rows // RANKS) + place, width)
                    tl.store(at + column, value.to(x.dtype.element_ty), mask=in_row)
        _meet(addresses, 2 * turn - 1, program, rank, RANKS)
        for i in range(n_rounds):
            place = program + i * PROGRAMS
            row = (place * RANKS + rank).to(tl.int64)
            if row < n:
                total = tl.zeros([BLOCK], tl.float32)
                for other in tl.static_range(RANKS):
                    if other == rank:
                        value = load_scaled(
                            part, row_scales, column_scales, row, width, column, real, UNSCALED
                        ).to(x.dtype.element_ty)
                    else:
                        at = _row_of((own + parts_at).to(x.dtype), other * (n_rows // RANKS) + place, width)
                        value = tl.load(at + column, mask=real, other=0.0)
                    total += value.to(tl.float32)
                normed = _added_norm(x, total, weights, row, width, eps, column, real)
                if ROUNDS:
                    scaled, scale = scaled_down(normed.to(tl.float32), _LARGEST)
                    result = scaled.to(out.dtype.element_ty)
                    tl.store(scales + row, scale)
                else:
                    result = normed
                tl.store(_row_of(out, row, width) + column, result, mask=real)
                for other in tl.static_range(RANKS):
                    if other != rank:
                        peer = tl.load(addresses + other)
                        tl.store(
                            _row_of((peer + results_at).to(out.dtype), row, width) + column, result, mask=real
                        )
                        if ROUNDS:
                            tl.store((peer + scales_at).to(scales.dtype) + row, scale)
        _meet(addresses, 2 * turn, program, rank, RANKS)
        for i in range(n_rounds):
            place = program + i * PROGRAMS
            for other in tl.static_range(RANKS):
                row = (place * RANKS + other).to(tl.int64)
                if other != rank:
                    in_row = column < tl.where(row < n, width, 0)
                    result = tl.load(
                        _row_of((own + results_at).to(out.dtype), row, width) + column, mask=in_row
                    )
                    tl.store(_row_of(out, row, width) + column, result, mask=in_row)
                    if ROUNDS:
                        scale = tl.load((own + scales_at).to(scales.dtype) + row, mask=row < n)
                        tl.store(scales + row, scale, mask=row < n)
    tl.store(turns + program, turn)


@triton.jit
def _row_of(rows, row, width):
    """Return the address of a row."""
    return tl.multiple_of(rows + row.to(tl.int64) * width, 16)


def sum_add_norm(
    shared: SharedRows, x: Tensor, part: Tensor | UnscaledProduct, weight: Tensor, eps: float, rounds: bool
) -> Tensor | RoundedRows:
    """Compute `step_kernels.add_norm` with the sum over the TP group of `part` [n, hidden] as delta.

    Collective, with the same n. Updates all rows of x, or only this rank's rows (see `SharedRows.splits`).
    """
    n, width = x.shape
    block = next_power_of_2(width)
    out: Tensor | RoundedRows = new_rounded(n, width, x) if rounds else torch.empty_like(x)
    to, scales = (out.numbers, out.scales) if isinstance(out, RoundedRows) else (out, out)
    (numbers, row_scales, column_scales), unscaled = parts_of(part)
    n_ranks = len(shared.addresses)
    few = not shared.splits(n, x.dtype)
    for at in range(0, n, shared.n_rows):
        rows = slice(at, min(n, at + shared.n_rows))
        n_programs = rows.stop - at if few else cdiv(rows.stop - at, n_ranks)
        _sum_add_norm[(min(n_programs, PROGRAMS),)](
            to[rows], scales[rows], x[rows], numbers[rows], row_scales[rows], column_scales, weight,
            shared.addresses, shared.turns[PROGRAMS if few else 0 :], shared.rank, shared.n_rows,
            rows.stop - at, width, eps, UNSCALED=unscaled, ROUNDS=rounds, FEW=few, FEW_ROWS=FEW_ROWS,
            PROGRAMS=PROGRAMS, RANKS=n_ranks, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
