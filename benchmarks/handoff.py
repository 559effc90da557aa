"""``benchmarks handoff``: KV caches between two ranks, moved as in a run, against plain messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.on_ranks import RankOptions
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import integers, positive

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor

    from mpillm.engine.cache.kv_cache import KVCache
    from mpillm.engine.handoff.peer_mover import PeerMover


class Options(RankOptions):
    """Options of ``benchmarks handoff``."""

    models = Field(
        "models",
        "presets whose shapes to use, separated by commas",
        default="llama3.1-8b,llama2-70b",
        group="benchmark",
    )
    prompt_lens = Field(
        "prompt_lens",
        "tokens of a KV cache, separated by commas",
        integers,
        default=(128, 1024, 8192),
        group="benchmark",
    )
    tokens_per_block = ModelFields.tokens_per_block.but(
        "tokens of one KV cache block", default=32, group="benchmark"
    )
    mebibytes = Field(
        "mebibytes",
        "MiB to move in a row for each figure, but at least 8 and at most 512 caches",
        positive,
        default=16384,
        group="benchmark",
    )
    over = Field(
        "over",
        "how, between GPUs; auto: from blocks to blocks where they reach each other's memory, else nccl",
        default="auto",
        choices=("auto", "nccl"),
        group="benchmark",
    )
    repeats = Field("repeats", "rounds; the median is printed", positive, default=5, group="benchmark")


_UNDER_WAY = 1 << 30  # bytes of KV caches moving at once; but at least 4 caches, and at most 64
_SINGLES = 100  # transfers of one cache alone; the median is printed


DESCRIPTION = (
    "Measure GB/s of KV caches moved from one rank's blocks to another's in a row, and the time of one alone."
)
N_RANKS = 2
EPILOG = "example:\n  mpirun -n 2 python -m benchmarks handoff"


class _Figures(NamedTuple):
    handoff: list[float]  # seconds for the caches in a row, per round
    plain: list[float]
    handoff_alone: float  # seconds, from the sender's start until it knows of the end
    plain_alone: float


def main(config: Options, world: MPI.Intracomm, device: int | None) -> None:
    """Call this on both ranks of an mpirun with two; rank 0 prints."""
    from mpillm.engine.shape.read_config import load_model_config

    what = "MPI" if device is None else "NCCL"
    if world.rank == 0:
        print(
            f"KV caches from rank 0 to rank 1, {config.device}, bfloat16,"
            f" scattered blocks of {config.tokens_per_block} tokens, in a row:"
        )
        print(
            f"  {'shape':<12} {'tokens':>6} {'MiB':>7} {'GB/s':>7} {f'{what} alone':>10} {'ratio':>6}"
            f"   {'one, ms':>8} {f'one, {what}':>9}"
        )
    bench = _Bench(config, world, device)
    for name in config.models.split(","):
        model = load_model_config(name)
        for n_tokens in config.prompt_lens:
            figures, n_bytes, n = bench.measure(model, n_tokens)
            if world.rank == 0:
                rate, plain = (
                    n * n_bytes / 1e9 / statistics.median(times) for times in (figures.handoff, figures.plain)
                )
                # Compare round by round: a noisy machine is noisy for both.
                ratio = statistics.median(b / a for a, b in zip(figures.handoff, figures.plain, strict=True))
                alone = f"{figures.handoff_alone * 1e3:>8.3f} {figures.plain_alone * 1e3:>9.3f}"
                print(
                    f"  {name:<12} {n_tokens:>6} {n_bytes / 2**20:>7.0f} {rate:>7.1f} {plain:>10.1f}"
                    f" {ratio:>6.2f}   {alone}",
                    flush=True,
                )
    if world.rank == 0:
        print("  every cache of the last round was compared: all are equal", flush=True)


class _Bench:
    def __init__(self, config: Options, world: MPI.Intracomm, device: int | None) -> None:
        import torch

        from mpillm.comms.mover import Mover, MpiMover

        self._config = config
        self._world = world
        self._sends = world.rank == 0
        self._on_gpu = device is not None
        self._device = torch.device("cpu" if device is None else f"cuda:{device}")
        self._handoff = world.Dup()
        self._mover: Mover = MpiMover(self._handoff)
        if self._on_gpu:
            from mpillm.engine.handoff.nccl_mover import NcclMover
            from mpillm.engine.parallel.nccl import NcclComm

            torch.cuda.set_device(self._device)
            self._plain = NcclComm.of(world)
            self._mover = NcclMover.connected(self._handoff, [1 - world.rank], sends=self._sends)

    def measure(self, model: Any, n_tokens: int) -> tuple[_Figures, int, int]:
        """Return the figures, the bytes of a cache, and how many caches were moved in a row."""
        import torch

        from mpillm.comms.mover import Peer
        from mpillm.engine.cache.kv_cache import KVCache
        from mpillm.engine.handoff.transfers import Transfers
        from mpillm.engine.schedule.transfer import Kind, Transfer
        from mpillm.engine.shape.layout import RankLayout

        size, random = self._config.tokens_per_block, np.random.default_rng(7)
        n_blocks = -(-n_tokens // size)
        n_bytes = 4 * model.n_layers * model.n_kv_heads * model.head_dim * n_tokens
        ahead = max(4, min(64, _UNDER_WAY // n_bytes))
        shape = (
            model.n_layers,
            ahead * n_blocks,
            model.n_kv_heads,
            size,
            model.head_dim,
            torch.bfloat16,
            self._device,
        )
        cache, peers = KVCache(*shape), {0: Peer(1 - self._world.rank, 1, 1)}
        there, here = (
            (1 + random.permutation(ahead * n_blocks)).reshape(ahead, n_blocks).tolist() for _ in range(2)
        )
        if self._sends:
            _fill(cache)
        transfers = Transfers(
            cache,
            model,
            RankLayout(),
            self._mover,
            peers,
            sends=self._sends,
            block_mover=self._peer_mover(cache),
        )
        kind, blocks = (Kind.SEND, there) if self._sends else (Kind.RECEIVE, here)
        n = min(512, max(8, (self._config.mebibytes << 20) // n_bytes))

        def hands_off(n: int) -> None:
            n_started = n_done = 0
            while n_done < n:
                slots = [i % ahead for i in range(n_started, min(n, n_done + ahead))]
                transfers.start([Transfer(kind, slot, 0, slot, n_tokens, blocks[slot]) for slot in slots])
                n_started += len(slots)
                n_done += len(transfers.poll())

        buffer = torch.ones(n_bytes, dtype=torch.uint8, device=self._device)
        move = {"handoff": hands_off, "plain": lambda n: self._move_plain(buffer, n)}
        times: dict[str, list[float]] = {name: [] for name in move}
        for i in range(self._config.repeats + 1):
            for name, moves in move.items():
                elapsed = self._timed(moves, n)
                if i:  # the first round warms up
                    times[name].append(elapsed)
        if not self._sends:
            expected = KVCache(*shape)
            _fill(expected)
            for a, b in ((cache.keys, expected.keys), (cache.values, expected.values)):
                for mine, theirs in zip(here[:n], there[:n], strict=True):
                    for part in range(model.n_layers):
                        tokens = [
                            pool[part, ids].transpose(0, 1).flatten(1, 2)[:, :n_tokens]
                            for pool, ids in ((a, mine), (b, theirs))
                        ]
                        if not torch.equal(*tokens):
                            raise RuntimeError("the KV cache that arrived differs from the one sent")
        alone = {
            name: statistics.median(self._timed(moves, 1) for _ in range(_SINGLES))
            for name, moves in move.items()
        }
        return _Figures(times["handoff"], times["plain"], alone["handoff"], alone["plain"]), n_bytes, n

    def _peer_mover(self, cache: KVCache) -> PeerMover | None:
        if not self._on_gpu or self._config.over == "nccl":
            return None
        from mpillm.engine.handoff.peer_mover import PeerMover

        made = PeerMover.connected(self._handoff, [1 - self._world.rank], cache, sends=self._sends)
        if self._sends and not made.ranks:
            print("  the GPUs do not reach each other's memory: over NCCL", flush=True)
        return made

    def _move_plain(self, buffer: Tensor, n: int) -> None:
        for _ in range(n):
            if self._on_gpu:
                (self._plain.send if self._sends else self._plain.receive)(buffer, 1 - self._world.rank)
            elif self._sends:
                self._world.Send(np.asarray(buffer), 1)
            else:
                self._world.Recv(np.asarray(buffer), 0)

    def _timed(self, moves: Callable[[int], None], n: int) -> float:
        """Return the seconds until the receiver has everything and the sender knows."""
        import torch

        self._world.Barrier()
        started = time.perf_counter()
        moves(n)
        if self._on_gpu:
            torch.cuda.synchronize()
        self._world.Barrier()
        return time.perf_counter() - started


def _fill(cache: KVCache) -> None:
    """Fill with random numbers, the same on both ranks."""
    import torch

    random = torch.Generator(cache.keys.device).manual_seed(7)
    for pool in (cache.keys, cache.values):
        for layer in pool:
            layer.normal_(generator=random)
