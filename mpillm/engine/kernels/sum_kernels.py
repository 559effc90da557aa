"""A sum over the GPUs of a TP group, its residual and its norm, in one Triton kernel over NVLink.

One shot: each rank puts its part of a row where all can read it, says so, waits for the others, and adds
every rank's part itself, in the order of the ranks, so that all have the same sum. A program has every
`PROGRAMS`th row on all ranks, and waits only for the same program there. It has two places for a row, which
take turns: who writes one for the second time knows that all have read it, since they have put the next row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpillm.engine.kernels.fp8_kernels import load_scaled, new_rounded, parts_of, store_rounded
from mpillm.engine.model.ops import Rounded, Unscaled
from mpillm.engine.parallel.shared_rows import PROGRAMS, SharedRows

_MOST_LOOKS = tl.constexpr(1 << 28)  # for another rank, some minutes
_LARGEST = tl.constexpr(448.0)  # fp8 number


@triton.jit
def _flag(addresses, rank, program, of, RANKS: tl.constexpr):
    """Return where `rank` reads the turn that program `program` of rank `of` has reached."""
    return tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + of


@triton.jit
def _row_of(addresses, rank, turn, row, n_rows, width, x, PROGRAMS: tl.constexpr, RANKS: tl.constexpr):
    """Return where the row that `rank` has put in this turn begins."""
    first = (tl.load(addresses + rank) + 4 * PROGRAMS * RANKS).to(x.dtype)
    return first + ((turn & 1) * n_rows + row).to(tl.int64) * width


@triton.jit(do_not_specialize=["rank", "n_rows", "n"])
def _sum_add_norm(
    out, scales, x, part, row_scales, column_scales, weight, addresses, turns, rank, n_rows, n, width, eps,
    UNSCALED: tl.constexpr, ROUNDS: tl.constexpr, PROGRAMS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < width
    n_rounds = tl.cdiv(n - program, PROGRAMS)
    turn = tl.load(turns + program) + 1
    for i in range(n_rounds):
        row = program + i * PROGRAMS
        put = load_scaled(part, row_scales, column_scales, row.to(tl.int64), width, column, real, UNSCALED)
        to = _row_of(addresses, rank, turn, row, n_rows, width, x, PROGRAMS, RANKS)
        tl.store(tl.multiple_of(to + column, 16), put.to(x.dtype.element_ty), mask=real)
    tl.debug_barrier()  # every thread has stored before one of them says so
    for other in tl.static_range(RANKS):
        if other != rank:
            tl.atomic_xchg(_flag(addresses, other, program, rank, RANKS), turn, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        if other != rank:
            flag = _flag(addresses, rank, program, other, RANKS)
            reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks = 0
            while (reached - turn < 0) & (looks < _MOST_LOOKS):  # right also where int32 begins again
                reached = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                looks += 1
            if looks == _MOST_LOOKS:  # the other rank is gone: end this process's work with an error
                tl.inline_asm_elementwise(
                    "trap; mov.u32 $0, $1;", "=r,r", [looks], dtype=tl.int32, is_pure=False, pack=1
                )
    tl.debug_barrier()
    tl.store(turns + program, turn)
    weights = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    for i in range(n_rounds):
        row = program + i * PROGRAMS
        total = tl.zeros([BLOCK], tl.float32)
        for other in tl.static_range(RANKS):
            of = _row_of(addresses, other, turn, row, n_rows, width, x, PROGRAMS, RANKS)
            total += tl.load(tl.multiple_of(of + column, 16), mask=real, other=0.0).to(tl.float32)
        at = row.to(tl.int64) * width
        value = tl.load(x + at + column, mask=real, other=0.0).to(tl.float32)
        value = (value + total.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at + column, value, mask=real)
        value = value.to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value) / width + eps) * weights
        if ROUNDS:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
            store_rounded(out, scales, row.to(tl.int64), width, column, normed, _LARGEST)
        else:
            tl.store(out + at + column, normed.to(out.dtype.element_ty), mask=real)


def sum_add_norm(
    shared: SharedRows, x: Tensor, part: Tensor | Unscaled, weight: Tensor, eps: float, rounds: bool
) -> Tensor | Rounded:
    """As `step_kernels.add_norm` with the sum over the TP group of `part` [n, hidden] as its delta.

    n is at most `shared.n_rows`. Every rank has to call it, with the same n.
    """
    n, width = x.shape
    block = triton.next_power_of_2(width)
    out: Tensor | Rounded = new_rounded(n, width, x) if rounds else torch.empty_like(x)
    to, scales = (out.numbers, out.scales) if isinstance(out, Rounded) else (out, out)
    added, unscaled = parts_of(part)
    _sum_add_norm[(min(n, PROGRAMS),)](
        to, scales, x, *added, weight, shared.addresses, shared.turns, shared.rank, shared.n_rows, n, width,
        eps, UNSCALED=unscaled, ROUNDS=rounds, PROGRAMS=PROGRAMS, RANKS=len(shared.addresses), BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
