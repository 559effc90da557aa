"""The sum over a TP group in one kernel, with the ranks of the group in streams of one GPU."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no GPU", allow_module_level=True)

from mpillm.engine.kernels import fp8_kernels  # noqa: E402
from mpillm.engine.kernels import step_kernels as kernels  # noqa: E402
from mpillm.engine.kernels.ops import Partial, RoundedRows, UnscaledProduct  # noqa: E402
from mpillm.engine.parallel.shared_rows import SharedRows  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# The interpreter has no bfloat16. Few rows of 16-bit floats go another way than those of float32.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
N_ROWS = 300


def streams_of(ranks: list[SharedRows]) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in ranks]  # type: ignore[no-untyped-call]


def group(n_ranks: int, width: int, dtype: torch.dtype) -> tuple[list[SharedRows], torch.Tensor]:
    """The room of each rank, and what keeps it alive."""
    n_bytes = SharedRows.n_bytes(n_ranks, N_ROWS, width, dtype)
    room = torch.zeros(n_ranks, n_bytes, dtype=torch.uint8, device=DEVICE)
    addresses = [row.data_ptr() for row in room]
    return [SharedRows.at(addresses, rank, N_ROWS, DEVICE) for rank in range(n_ranks)], room


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_ranks", [1] if INTERPRETED else [1, 2, 4])
def test_every_rank_has_the_same_sum(n_ranks: int, dtype: torch.dtype) -> None:
    """Turn after turn, with other numbers of rows each time."""
    width = 576
    ranks, room = group(n_ranks, width, dtype)
    streams = [] if INTERPRETED else streams_of(ranks)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    torch.manual_seed(0)
    for n in (3, 300, 1, 64, 65, 129, 64, 3, 128, 700, 7) if not INTERPRETED else (3, 129, 2):
        parts = torch.randn(n_ranks, n, width, device=DEVICE).to(dtype)
        residual = torch.randn(n, width, device=DEVICE).to(dtype)
        total = parts.float().sum(0).to(dtype)
        wanted_x = residual.clone()
        wanted = kernels.add_norm(wanted_x, total, weight, 1e-5)
        xs = [residual.clone() for _ in ranks]
        outs = []
        if not INTERPRETED:
            torch.cuda.synchronize()
        for rank, shared in enumerate(ranks):
            with torch.cuda.stream(streams[rank] if streams else None):
                outs.append(kernels.add_norm(xs[rank], Partial(parts[rank], shared), weight, 1e-5))
        if not INTERPRETED:
            torch.cuda.synchronize()
        for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
            assert isinstance(out, torch.Tensor) and isinstance(wanted, torch.Tensor)
            assert torch.equal(out, wanted), (n_ranks, n)
            own = slice(rank, None, n_ranks) if ranks[0].splits(n, dtype) else slice(None)
            assert torch.equal(x[own], wanted_x[own]), (n_ranks, n)
    assert room is not None


@pytest.mark.skipif(not INTERPRETED, reason="streams are the ranks")
@pytest.mark.parametrize("n", [3, 40, 310])
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_every_rank_has_the_same_sum_without_a_gpu(n_ranks: int, n: int) -> None:
    """In Triton's interpreter, which runs one program after the other: each rank is a process."""
    width, dtype, n_turns = 16, torch.float16, 2
    n_bytes = SharedRows.n_bytes(n_ranks, N_ROWS, width, dtype)
    rooms = [np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8) for _ in range(n_ranks)]
    addresses = [room.ctypes.data for room in rooms]
    torch.manual_seed(0)
    parts = torch.randn(n_turns, n_ranks, n, width).to(dtype)
    residual, weight = torch.randn(n_turns, n, width).to(dtype), torch.rand(width).to(dtype)
    wanted = torch.empty(n_turns, 2, n, width, dtype=dtype)  # the residual and its norm
    for turn in range(n_turns):
        wanted[turn, 0] = residual[turn]
        total = parts[turn].float().sum(0).to(dtype)
        wanted[turn, 1] = torch.as_tensor(kernels.add_norm(wanted[turn, 0], total, weight, 1e-5))

    def run(rank: int) -> bool:
        shared = SharedRows.at(addresses, rank, N_ROWS, DEVICE)
        own = slice(rank, None, n_ranks) if shared.splits(n, dtype) else slice(None)
        is_right = True
        for turn in range(n_turns):
            x = residual[turn].clone()
            out = torch.as_tensor(kernels.add_norm(x, Partial(parts[turn, rank], shared), weight, 1e-5))
            is_right &= torch.equal(out, wanted[turn, 1]) and torch.equal(x[own], wanted[turn, 0, own])
        return is_right

    children = []
    for rank in range(n_ranks):
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                is_right = run(rank)
            finally:
                os._exit(not is_right)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * n_ranks


@pytest.mark.skipif(INTERPRETED, reason="rounds differently")
@pytest.mark.parametrize("n", [40, 200])
def test_scales_and_rounding(n: int) -> None:
    """Parts without their scales, and a result in fp8."""
    width, dtype = 4096, torch.bfloat16
    ranks, room = group(2, width, dtype)
    streams = streams_of(ranks)
    weight = torch.rand(width, device=DEVICE).to(dtype)
    products = [
        UnscaledProduct(
            torch.randn(n, width, device=DEVICE).to(dtype),
            torch.rand(n, 1, device=DEVICE),
            torch.rand(1, width, device=DEVICE),
        )
        for _ in ranks
    ]
    total = sum(fp8_kernels.scaled(product).float() for product in products)
    assert isinstance(total, torch.Tensor)
    nothing = torch.zeros(n, width, device=DEVICE).to(dtype)
    wanted = kernels.add_norm(nothing.clone(), total.to(dtype), weight, 1e-5, True)
    xs = [nothing.clone() for _ in ranks]
    outs = []
    torch.cuda.synchronize()
    for rank, shared in enumerate(ranks):
        with torch.cuda.stream(streams[rank]):
            outs.append(kernels.add_norm(xs[rank], Partial(products[rank], shared), weight, 1e-5, True))
    torch.cuda.synchronize()
    assert isinstance(wanted, RoundedRows)
    for out in outs:
        assert isinstance(out, RoundedRows)
        assert torch.equal(out.numbers.view(torch.uint8), wanted.numbers.view(torch.uint8))
        assert torch.equal(out.scales, wanted.scales)
    assert room is not None
