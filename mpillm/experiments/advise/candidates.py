"""Ways to use a number of GPUs (or worker ranks): instances, their layouts, and their batch size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

_BATCHES = 4  # max_batch_size, a half of it, a quarter, …


class InstanceShape(NamedTuple):
    """TP and PP size of an instance."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")


ONE_RANK = InstanceShape()


@dataclass(frozen=True)
class Candidate:
    """A set of instances: aggregated ones, or context and generation instances."""

    layout: InstanceShape  # of an aggregated or a generation instance
    instances: int
    max_batch_size: int
    ctx_layout: InstanceShape = ONE_RANK
    ctx_instances: int = 0  # 0: aggregated

    @property
    def mode(self) -> str:
        return "disaggregated" if self.ctx_instances else "aggregated"

    @property
    def ranks(self) -> int:
        """Number of worker ranks."""
        return self.instances * self.layout.ranks + self.ctx_instances * self.ctx_layout.ranks

    @property
    def shape(self) -> Candidate:
        """The same instances with any batch size."""
        return Candidate(self.layout, self.instances, 0, self.ctx_layout, self.ctx_instances)

    def args(self) -> list[str]:
        """Return the options of ``run`` for this candidate."""
        if self.ctx_instances:
            counts = {"num_ctx_servers": self.ctx_instances, "num_gen_servers": self.instances}
            ctx, own = self.ctx_layout, self.layout
            sizes = {"ctx_tp_size": ctx.tp, "ctx_pp_size": ctx.pp}
            sizes |= {"gen_tp_size": own.tp, "gen_pp_size": own.pp}
        else:
            counts = {}
            sizes = {"tensor_parallelism": self.layout.tp, "pipeline_parallelism": self.layout.pp}
        counts |= {name: size for name, size in sizes.items() if size > 1}
        options = {"mode": self.mode, **counts, "max_batch_size": self.max_batch_size}
        return [f"--{name}={value}" for name, value in options.items()]

    def __str__(self) -> str:
        own = f"{self.instances} x {self.layout}"
        return f"{self.ctx_instances} x {self.ctx_layout} ctx, {own} gen" if self.ctx_instances else own


def layouts(ranks: int) -> list[InstanceShape]:
    """Return the layouts to consider on `ranks` ranks: powers of two, either TP or PP."""
    sizes = [1 << i for i in range(1, ranks.bit_length()) if 1 << i <= ranks]
    return [
        ONE_RANK,
        *(InstanceShape(tp=size) for size in sizes),
        *(InstanceShape(pp=size) for size in sizes),
    ]


def candidates(
    ranks: int, allowed: Iterable[InstanceShape], modes: Iterable[str], max_batch_size: int
) -> Iterator[Candidate]:
    """Yield all ways to use all `ranks` with instances of these layouts, with several batch sizes."""
    allowed = list(allowed)
    batches = sorted({max(1, max_batch_size >> i) for i in range(_BATCHES)})
    for batch in batches:
        if "aggregated" in modes:
            for layout in allowed:
                if ranks % layout.ranks == 0:
                    yield Candidate(layout, ranks // layout.ranks, batch)
        if "disaggregated" in modes:
            for ctx in allowed:
                for gen in allowed:
                    for n in range(1, ranks // ctx.ranks + 1):
                        left = ranks - n * ctx.ranks
                        if left >= gen.ranks and left % gen.ranks == 0:
                            yield Candidate(gen, left // gen.ranks, batch, ctx, n)
