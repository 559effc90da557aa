"""What the ranks of an instance hold, and how a step travels between them.

The runs are in tests/e2e/test_parallel.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from mpillm.engine.kernels import ops
from mpillm.engine.model.feed_forward import ExpertMixture
from mpillm.engine.schedule.block_allocator import BlockAllocator
from mpillm.engine.schedule.engine_messages import PLAN
from mpillm.engine.schedule.sampling_params import SamplingParams
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.shape import composition
from mpillm.engine.shape.engine_config import SchedulerConfig
from mpillm.engine.shape.layout import RankLayout, share
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.shape.tensor_shapes import tensor_shapes
from mpillm.engine.weights.rank_weights import Shards
from mpillm.engine.weights.sources import Checkpoint, DummyWeights
from tests.helpers.presets import save_preset

SHAPES = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 3, 1), (2, 1, 2), (4, 2, 2), (4, 6, 4)]


def ranks(tp: int, pp: int, ep: int) -> list[RankLayout]:
    return [RankLayout(tp, pp, ep, tp_rank, pp_rank) for pp_rank in range(pp) for tp_rank in range(tp)]


@pytest.mark.parametrize("n", [1, 7, 30, 256])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_even_and_complete(n: int, size: int) -> None:
    parts = [range(n)[share(n, rank, size)] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral", "uneven"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.long
def test_the_ranks_hold_everything_once(name: str, shape: tuple[int, int, int]) -> None:
    """Each value of a matrix is on one rank, except KV heads that more ranks share than there are heads.

    Each rank holds the small rest.
    """
    config = load_model_config("tiny-mixtral" if name == "tiny-mixtral" else "tiny-llama")
    if name == "uneven":
        config = dataclasses.replace(config, vocab_size=509, intermediate_size=251, n_layers=7, n_kv_heads=2)
    if shape[2] > 1 and not config.n_experts:
        pytest.skip("no experts")
    held: dict[str, np.ndarray] = {
        name: np.zeros(size, np.int64) for name, size in tensor_shapes(config).items()
    }
    for layout in ranks(*shape):
        for tensor in layout.tensors(config):
            rows, columns = layout.part(tensor, config)
            part = held[tensor][(rows, columns) if held[tensor].ndim == 2 else rows]
            part += 1
            assert layout.shapes(config)[tensor] == part.shape
    for tensor, counts in held.items():
        assert counts.min() == counts.max(), tensor
        copies = shape[0] if counts.ndim == 1 or tensor.endswith("moe.gate.weight") else 1
        if "k_proj" in tensor or "v_proj" in tensor:
            copies = max(1, shape[0] // config.n_kv_heads)
        assert counts.min() == copies, tensor


def test_query_heads_lie_with_their_kv_heads() -> None:
    config = load_model_config("tiny-llama")  # 8 query heads, 4 KV heads
    for size in (1, 2, 4, 8):
        for layout in ranks(size, 1, 1):
            queries = [
                row // config.head_dim
                for row in range(8 * config.head_dim)[layout.part("x.q_proj.weight", config)[0]]
            ]
            kv = layout.kv_heads(config)
            assert {query // 2 for query in queries} == set(range(kv.start, kv.stop))


def test_slices_of_a_file_are_those_of_the_whole(tmp_path: Path) -> None:
    save_preset("tiny-llama", tmp_path)
    config = load_model_config("tiny-llama")
    name = "model.layers.3.mlp.down_proj.weight"
    for source in (Checkpoint(tmp_path, config), DummyWeights(config)):
        whole = source.get(name)
        assert torch.equal(source.get(name, slice(3, 70), slice(9, 200)), whole[3:70, 9:200])
        assert torch.equal(source.get(name, slice(None), slice(128, 256)), whole[:, 128:])
        assert torch.equal(source.get("model.norm.weight"), source.get("model.norm.weight", slice(0, 128)))


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 1, 2), (4, 1, 4), (8, 1, 4)], ids=str)
def test_what_the_ranks_experts_contribute_adds_up(shape: tuple[int, int, int]) -> None:
    """The sum is right even if no row chooses a rank's experts, or there is no row."""
    config = load_model_config("tiny-mixtral")
    source = DummyWeights(config)

    def contribution(layout: RankLayout, x: torch.Tensor) -> torch.Tensor:
        shards = Shards(source, config, layout, torch.float32)
        parts = config.layer(0).feed_forward
        assert isinstance(parts, composition.Mixture)
        return ExpertMixture(shards, f"model.layers.0.{parts.prefix}", parts, layout.experts(config), ops)(x)

    for n in (0, 1, 40):
        x = torch.randn(n, config.hidden_size)
        parts = [contribution(layout, x) for layout in ranks(*shape)]
        torch.testing.assert_close(sum(parts[1:], parts[0]), contribution(RankLayout(), x))
        n_silent = sum(not part.any() for part in parts)
        assert (
            n_silent == 0
            if n == 40
            else n_silent == len(parts)
            if n == 0
            else shape[2] < 4 or n_silent >= len(parts) // 2
        )


def make_sequence(
    i: int, n_prompt: int, sampling: SamplingParams | None = None, min_output: int = 0
) -> Sequence:
    return Sequence(i, list(range(n_prompt)), 20, min_output, sampling or SamplingParams())


@pytest.mark.parametrize("n_in_flight", [1, 3])
@pytest.mark.parametrize("n_blocks", [40, 200])
def test_a_step_arrives_as_it_was_sent(n_in_flight: int, n_blocks: int) -> None:
    """Steps arrive whole while sequences grow, end and are evicted. The messages name each block once."""
    random = np.random.default_rng(1)
    scheduler = Scheduler(
        SchedulerConfig(8, 16, 4, enable_chunked_context=True), BlockAllocator(n_blocks), n_in_flight
    )
    for i in range(30):
        sampling = SamplingParams(0.5, 7, 0.25, 2**32 - 1) if i % 7 == 3 else None
        scheduler.add(make_sequence(i, int(random.integers(1, 60)), sampling, min_output=i % 3))
    tables: dict[int, list[int]] = {}
    in_flight: list[tuple[list[Sequence], list[Sequence]]] = []
    n_sampled = n_steps = 0
    largest = 0
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan() if len(in_flight) < n_in_flight else []
        if plan:
            sequences = [sequence for sequence, _ in plan]
            assert not any(s.in_flight for s in sequences)
            assert len({s.slot for s in scheduler.running} | {-1}) == len(scheduler.running) + 1
            step = scheduler.commit(plan)
            message = PLAN.write(step)
            assert PLAN.read(message) == step
            for span, sequence in zip(step.spans, sequences, strict=True):
                tables.setdefault(span.slot, [])[span.n_blocks_sent :] = span.blocks
                assert tables[span.slot] == sequence.blocks
            n_sampled += step.sampling is not None
            n_steps += 1
            largest = max(largest, len(message) // 4)
            for sequence in sequences:
                sequence.in_flight = True
            in_flight.append((sequences, step.sampled))
        if in_flight and (not plan or random.random() < 0.5):
            sequences, sampled = in_flight.pop(0)
            for sequence in sequences:
                sequence.in_flight = False
            for sequence in sampled:
                sequence.output.append(1)
                if len(sequence.output) == sequence.max_output:
                    scheduler.drop(sequence)
                    scheduler.free(sequence)
        assert n_steps < 5000
    assert n_sampled > 5
    assert scheduler.preemptions > 0 or n_blocks == 200
    assert len(tables) <= 8
    assert largest < 4 + 8 * 6 + 16 + 8 * 15 + 8 * 5


def test_generating_sequences_are_spread_over_the_stages() -> None:
    scheduler = Scheduler(SchedulerConfig(8, 64, 4, enable_chunked_context=True), BlockAllocator(100), 3)
    for i in range(8):
        scheduler.add(make_sequence(i, 4))
    (first,) = [scheduler.plan()]
    scheduler.commit(first)
    for sequence, _ in first:
        sequence.output.append(1)
    sizes = []
    for _ in range(3):
        plan = scheduler.plan()
        sizes.append(len(plan))
        scheduler.commit(plan)
        for sequence, _ in plan:
            sequence.in_flight = True
    assert sizes == [3, 3, 2]
    assert not scheduler.can_plan()
