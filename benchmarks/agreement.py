"""``benchmarks agreement``: how far answers and logits agree between tensor parallel sizes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.on_ranks import RankOptions
from mpillm.comms.communicators import InstanceComms
from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch
from mpillm.cores.base import CoreConfig
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import positive

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpillm.cores.torch_core import TorchCore
    from mpillm.engine.schedule.step import Step


class Options(RankOptions):
    """Options of ``benchmarks agreement``."""

    model_path = ModelFields.model_path.but(
        "a Hugging Face folder or a preset", default="llama3.2-1b", group="benchmark"
    )
    num_prompts = Field("num_prompts", "how many random prompts", positive, default=32, group="benchmark")
    prompt_len = Field(
        "prompt_len",
        "tokens of the longest prompt; the shortest has one",
        positive,
        default=64,
        group="benchmark",
    )
    output_len = Field("output_len", "new tokens per prompt", positive, default=64, group="benchmark")


_PAUSE_S = 1e-4
_MOST_ROWS = 1024  # rows of logits to compare: float32, as long as the vocabulary


class _Outcome(NamedTuple):
    answers: list[list[int]]
    logits: NDArray[np.float32]  # of every token of some prompts


DESCRIPTION = (
    "Compare greedy answers and logits of tensor parallel 2, 4, … in bfloat16"
    " with those of one rank, and with float32."
)
N_RANKS = None
EPILOG = "example:\n  mpirun -n 4 python -m benchmarks agreement --model_path llama3.2-1b"


def main(config: Options, world: MPI.Intracomm, device: int | None) -> None:
    """Call this on every rank of an mpirun with as many ranks as the largest instance; rank 0 prints."""
    sizes = [size for size in (1 << i for i in range(8)) if size <= world.size]
    outcomes = {f"TP {size}, bfloat16": _measure(config, world, device, size, "bfloat16") for size in sizes}
    exact = _measure(config, world, device, 1, "float32")
    first = outcomes.pop("TP 1, bfloat16")
    if first is None or exact is None:
        return
    print(
        f"{config.model_path}, {config.num_prompts} prompts of 1 to {config.prompt_len} tokens,"
        f" {config.output_len} new tokens, greedy"
    )
    print(
        f"  {'against TP 1, bfloat16':<24} {'same answers':>13} {'to the first difference: mean':>30}"
        f" {'least':>6} {'logits apart':>13}"
    )
    for name, outcome in [*outcomes.items(), ("TP 1, float32", exact)]:
        if outcome is not None:
            lengths = [agreeing(a, b) for a, b in zip(first.answers, outcome.answers, strict=True)]
            same = sum(length == config.output_len for length in lengths)
            apart = float(np.abs(first.logits - outcome.logits).mean())
            print(
                f"  {name:<24} {same:>7} of {len(lengths):<3} {np.mean(lengths):>29.1f}"
                f" {min(lengths):>6} {apart:>13.5f}"
            )
    mean_value = float(np.abs(exact.logits).mean())
    print(f"  logits apart: mean |difference|; the mean |value| is {mean_value:.4f}", flush=True)


def agreeing(a: list[int], b: list[int]) -> int:
    """Return how many tokens precede the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _measure(
    config: Options, world: MPI.Intracomm, device: int | None, size: int, dtype: str
) -> _Outcome | None:
    """Run one instance on the first `size` ranks; None on the others."""
    from mpi4py import MPI

    comm: Any = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
    outcome = None
    if comm != MPI.COMM_NULL:
        outcome = _instance(config, comm, device, dtype)
        comm.Free()
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(_PAUSE_S)
    return outcome


def _instance(config: Options, comm: MPI.Intracomm, gpu: int | None, dtype: str) -> _Outcome:
    from mpi4py import MPI

    from mpillm.cores.torch_core import TorchCore

    engine = EngineConfig(
        SchedulerConfig(max_batch_size=config.num_prompts, enable_chunked_context=True),
        model_path=config.model_path,
        dtype=dtype,
        max_seq_len=config.prompt_len + config.output_len,
        kv_cache_free_gpu_mem_fraction=0.9,
        end_ids=(),
        tp_size=comm.size,
        tp_rank=comm.rank,
        gpu=gpu,
        gpu_bytes=None if gpu is None else comm.allreduce(TorchCore.gpus()[gpu].free, MPI.MIN),
    )
    core = TorchCore(
        CoreConfig("torch", engine),
        InstanceComms(comm, comm, MPI.COMM_SELF) if comm.size > 1 else None,
    )
    core.load()
    random = np.random.default_rng(7)
    lengths = 1 + np.arange(config.num_prompts) * (config.prompt_len - 1) // max(1, config.num_prompts - 1)
    prompts = [random.integers(0, core.info.vocab_size, n).tolist() for n in lengths]
    answers = answer(core, prompts, config.output_len) if comm.rank == 0 else {}
    done = comm.Ibarrier()
    while not done.Test():  # the others follow until rank 0 gets here
        if comm.rank and core.has_work():
            core.poll_responses()
        else:
            time.sleep(_PAUSE_S)
    outcome = _Outcome([answers.get(i, []) for i in range(len(prompts))], _logits(core, prompts))
    core.notify_stop()
    return outcome


def answer(core: TorchCore, prompts: list[list[int]], n_output: int, **fields: Any) -> dict[int, list[int]]:
    """Return the answers by prompt; `fields`: values for fields of REQUEST, for sampling."""
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"], rows["n_tokens"] = np.arange(len(prompts)), list(map(len, prompts))
    rows["max_output"] = rows["min_output"] = n_output
    rows["top_p"], rows["generation"] = 1, NO_INSTANCE
    for name, value in fields.items():
        rows[name] = value
    core.enqueue(Batch(rows, np.array([token for prompt in prompts for token in prompt], np.int32)))
    answers: dict[int, list[int]] = {}
    while len(answers) < len(prompts):
        batch = core.poll_responses() if core.has_work() else None
        if batch is None:
            time.sleep(_PAUSE_S)
            continue
        offsets = batch.offsets()
        for i, row in enumerate(batch.rows):
            if row["n_tokens"] == n_output:
                answers[int(row["id"])] = batch.tokens[offsets[i] : offsets[i + 1]].tolist()
    return answers


def step_of(core: TorchCore, prompts: list[list[int]]) -> Step:
    """Return a step that computes these prompts, with the logits of every token."""
    from mpillm.engine.schedule.step import Span, Step

    step, block = Step(), 1
    for slot, prompt in enumerate(prompts):
        n_blocks = -(-len(prompt) // core.config.engine.scheduler.tokens_per_block)
        blocks = list(range(block, block + n_blocks))
        step.spans.append(Span(slot, 0, len(prompt), 0, blocks, window_blocks=blocks))
        step.tokens += prompt
        block += n_blocks
    step.logits_rows = list(range(len(step.tokens)))
    return step


def _logits(core: TorchCore, prompts: list[list[int]]) -> NDArray[np.float32]:
    """Logits of every token of as many of the last prompts as fit; call this on all ranks of the instance."""
    import torch

    most, fitting = min(_MOST_ROWS, core.config.engine.scheduler.max_num_tokens), list[list[int]]()
    for prompt in reversed(prompts):
        if len(prompt) < 2 or sum(map(len, fitting)) + len(prompt) > most:
            break
        fitting.append(prompt)
    worker = core.worker
    assert worker is not None
    with torch.inference_mode():
        sizes = core.info.layout.vocabulary_sizes(core.info.config)
        whole = worker.part.groups.gather(worker.logits(step_of(core, fitting)).float(), sizes)
    return np.empty(0, np.float32) if whole is None else whole.cpu().numpy()
