"""``benchmarks all-reduce``: sums over the GPUs of a TP group, by NCCL and by the engine's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.on_ranks import RankOptions
from disagg.errors import ConfigError
from mpillm.options.field import Field
from mpillm.options.parsers import boolean, integers, positive

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor


class Options(RankOptions):
    """Options of ``benchmarks all-reduce``."""

    rows = Field(
        "rows",
        "numbers of rows, separated by commas",
        integers,
        default=(1, 16, 64, 256, 512, 1024, 4096),
        group="benchmark",
    )
    hidden_size = Field("hidden_size", "width of a row", positive, default=4096, group="benchmark")
    rounds = Field(
        "rounds",
        "round the result to fp8, as before a product with fp8 weights",
        boolean,
        default=False,
        group="benchmark",
    )
    n_sums = Field("n_sums", "sums in a row, in one CUDA graph", positive, default=64, group="benchmark")


DESCRIPTION = (
    "Measure a sum of bfloat16 rows over all ranks' GPUs, with residual and norm, in a CUDA graph:"
    " by NCCL and another kernel, and by one kernel over NVLink."
)
N_RANKS = None
EPILOG = "example:\n  mpirun -n 2 python -m benchmarks all-reduce"


def main(config: Options, world: MPI.Intracomm, device: int | None) -> None:
    """Call this on every rank; rank 0 prints. Raises ConfigError without GPUs that reach each other."""
    if device is None:
        raise ConfigError("benchmarks all-reduce: --device cuda is needed")
    import torch

    from benchmarks.decode_parts import CudaGraphs
    from mpillm.engine.kernels.ops import Partial, RoundedRows
    from mpillm.engine.parallel.nccl import NcclComm
    from mpillm.engine.parallel.shared_rows import SharedRows
    from mpillm.engine.run.gpu_steps import use_gpu

    kernels = use_gpu(f"cuda:{device}")
    nccl, width = NcclComm.of(world), config.hidden_size
    shared = SharedRows.of(world, width, torch.bfloat16)
    if shared is None:
        raise ConfigError("benchmarks all-reduce: these GPUs do not reach each other's memory with atomics")
    torch.manual_seed(world.rank)
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    if world.rank == 0:
        print(f"{world.size} x {torch.cuda.get_device_name()}, rows of {width} bfloat16; one sum, us:")
        print(f"  {'rows':>6} {'KiB':>7} {'NCCL, norm':>11} {'one kernel':>11} {'ratio':>6}  apart")
    rest = weight, 1e-5, config.rounds

    def numbers(out: Tensor | RoundedRows) -> Tensor:
        return out.numbers.float() * out.scales if isinstance(out, RoundedRows) else out.float()

    for n in config.rows:
        part = torch.randn(n, width, device="cuda").bfloat16()
        x = torch.zeros_like(part)
        sums = (
            lambda: kernels.add_norm(x, nccl.all_reduce(part), *rest),  # noqa: B023 - called in this turn
            lambda: kernels.add_norm(x, Partial(part, shared), *rest),  # noqa: B023
        )
        by_kernel = numbers(sums[1]())
        x.zero_()
        wanted = numbers(kernels.add_norm(x, nccl.all_reduce(part.clone()), *rest))
        times = []
        for one in sums:
            world.Barrier()
            times.append(1e6 * CudaGraphs().seconds_of(partial(_repeat, one, config.n_sums)) / config.n_sums)
        if world.rank == 0:
            print(
                f"  {n:>6} {n * width * 2 / 1024:>7.0f} {times[0]:>11.1f} {times[1]:>11.1f}"
                f" {times[0] / times[1]:>6.2f}  {float((by_kernel - wanted).abs().max()):.2g}",
                flush=True,
            )


def _repeat(work: Callable[[], object], n: int) -> None:
    for _ in range(n):
        work()
