"""Ranks of one instance in threads, on a CPU in the GPU's way of running steps: what they do together."""

from __future__ import annotations

import queue
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.ops import Partial
from mpillm.engine.model.layers import TpSum
from mpillm.engine.parallel.groups import Groups, MpiGroups
from mpillm.engine.parallel.shared_rows import SharedRows
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.step import Span, Step
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import check_model
from tests.helpers import plain_kernels
from tests.helpers.engine_configs import engine_config

_SIZES: dict[str, Any] = {"max_seq_len": 64, "tokens_per_block": 8, "max_batch_size": 5}


class ThreadGroups(MpiGroups):
    """Runs the ranks of an instance as threads: a collective goes on when all of a TP group have come to the
    same one."""

    def __init__(
        self,
        layout: RankLayout,
        meeting: threading.Barrier,
        provided: list[Any],
        hidden: queue.Queue[torch.Tensor],
    ) -> None:
        Groups.__init__(self, layout)
        self._meeting, self._brought, self._between = meeting, provided, hidden

    def _all(self, what: str, x: torch.Tensor) -> list[torch.Tensor]:
        self._brought[self.layout.tp_rank] = what, x.clone()
        self._meeting.wait(30)
        assert len({name for name, _ in self._brought}) == 1, self._brought
        parts = [part for _, part in self._brought]
        self._meeting.wait(30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return (
            torch.stack(self._all(f"all-reduce {list(x.shape)}", x)).sum(0) if self.layout.tp_size > 1 else x
        )

    def gather(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return torch.cat(self._all(f"gather {len(x)}", x), dim=1) if self.layout.tp_size > 1 else x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(f"broadcast {len(x)}", x)[0] if self.layout.tp_size > 1 else x

    def send_hidden(self, x: torch.Tensor) -> None:
        self._between.put(x.clone())

    def receive_hidden(
        self, n_rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        x = self._between.get(timeout=300)
        assert (x.shape, x.dtype) == ((n_rows, width), dtype)
        return x


@pytest.mark.parametrize("sizes", [(), (16, 64)], ids=["", "padded between attentions"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_all_ranks_of_an_instance_warm_up_together(
    folder: Path, shape: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    """Each rank does the same collectives in the same order, and takes what the stage before it has sent."""
    torch.set_num_threads(1)
    meeting, provided, hidden = threading.Barrier(2), [None, None], queue.Queue[torch.Tensor]()

    def warm_up(rank: int) -> None:
        tp_rank, pp_rank = (rank, 0) if shape == (2, 1) else (0, rank)
        layout = {"tp_size": shape[0], "pp_size": shape[1], "tp_rank": tp_rank, "pp_rank": pp_rank}
        config = engine_config(folder, **layout, **_SIZES)
        groups = ThreadGroups(RankLayout(*shape, 1, tp_rank, pp_rank), meeting, provided, hidden)
        worker = Worker.on_gpu(config, check_model(config), groups, plain_kernels)
        if sizes:
            steps: Any = worker.steps
            steps._layers = steps._new_layers(max(sizes))
            for size in sizes:
                steps._layers.add(size)
        worker.warm_up(100)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(warm_up, range(2)))
    assert hidden.empty()


@pytest.mark.parametrize("sizes", [(), (64,)], ids=["", "padded between attentions"])
def test_a_residual_is_right_in_a_ranks_own_rows_only(folder: Path, sizes: tuple[int, ...]) -> None:
    """What the others have of it never reaches a token."""
    torch.set_num_threads(1)
    meeting, provided = threading.Barrier(2), [None, None]
    tokens = torch.randint(0, 256, (47,), generator=torch.Generator().manual_seed(3)).tolist()
    steps = [
        Step([Span(0, 0, 40, 0, [1, 2, 3, 4, 5, 6]), Span(1, 0, 7, 0, [7, 8])], tokens, [39, 46]),
        Step([Span(1, 7, 1, 2, []), Span(0, 40, 5, 6, [])], tokens[:6], [0, 3, 5]),
        Step([Span(0, 45, 1, 6, []), Span(1, 8, 1, 2, [])], tokens[:2], [0, 1]),
    ]

    def run(rank: int, tp_size: int) -> list[list[int]]:
        config = engine_config(folder, dtype="float32", tp_size=tp_size, tp_rank=rank, **_SIZES)
        groups = ThreadGroups(RankLayout(tp_size, 1, tp_rank=rank), meeting, provided, queue.Queue())
        kernels = types.SimpleNamespace(**vars(plain_kernels))

        def add_norm(x: torch.Tensor, delta: Any, *rest: Any) -> Any:
            if not isinstance(delta, Partial):
                return plain_kernels.add_norm(x, delta, *rest)
            whole = x.clone()
            whole[1 - rank :: 2] = torch.stack(groups._all(f"residual {len(x)}", x))[1 - rank, 1 - rank :: 2]
            normed = plain_kernels.add_norm(whole, groups.all_reduce(torch.as_tensor(delta.product)), *rest)
            x.copy_(whole)
            x[1 - rank :: 2] = torch.nan
            return normed

        kernels.add_norm = add_norm
        worker = Worker.on_gpu(config, check_model(config), groups, kernels)
        if tp_size > 1:
            groups.shared_rows = SharedRows.at([0, 0], rank, 64, torch.device("cpu"))
        if sizes:
            gpu_steps: Any = worker.steps
            gpu_steps._layers = gpu_steps._new_layers(max(sizes))
            for size in sizes:
                gpu_steps._layers.add(size)
        sampled = [worker.run(step) for step in steps]
        return [one.take() for one in sampled if one is not None]

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(lambda rank: run(rank, 2), range(2))
    assert first == run(0, 1)


def test_a_sum_is_left_to_the_next_norm() -> None:
    """Ranks that share rows leave the sum to a norm that adds it; otherwise NCCL adds their parts."""

    class Nccl(Groups):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    groups: Any = Nccl(RankLayout(2, 1, 1, 0, 0))
    tp_sum, part = TpSum(groups, ops, norm_adds=True), torch.ones(256, 4)
    assert torch.equal(torch.as_tensor(tp_sum(part)), 2 * part)
    groups.shared_rows = SharedRows.at([0] * 4, 0, 256, torch.device("cpu"))
    left = tp_sum(part)
    assert isinstance(left, Partial) and left.product is part and left.shared is groups.shared_rows
    assert torch.equal(torch.as_tensor(TpSum(groups, ops, norm_adds=False)(part)), 2 * part)
