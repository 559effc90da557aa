"""A head that guesses, on the first of an engine's two ranks: it guesses what it guesses on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpillm.comms.communicators import InstanceComms
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from tests.helpers.engine_configs import engine_config
from tests.helpers.followers import STOP, follow

pytestmark = pytest.mark.mpi(min_size=2)

Drafts = dict[tuple[int, ...], list[int]]


def save(kind: str, folder: Path) -> dict[str, Any]:
    """Save a model, and the head if it is not the model's own; return how to guess with it."""
    from tests.helpers.eagle_heads import eagle, save_head
    from tests.helpers.mtp_heads import mtp, save_model
    from tests.helpers.presets import save_preset

    if kind == "MTP":
        pytest.importorskip("transformers")
        save_model(folder)
        return mtp(3)
    save_preset("tiny-llama", folder)
    save_head(folder, folder / "head")
    return eagle(folder / "head")


def ask(core: TorchCore, right: Drafts) -> tuple[list[list[int]], Drafts]:
    """Return the answers, and what was guessed behind which tokens."""
    from tests.helpers.eagle_heads import Seen
    from tests.helpers.gpu_cores import answer
    from tests.helpers.torch_cores import make_batch

    seen = Seen(core, right)
    core.start_test()
    found = answer(core, make_batch([list(prompt) for prompt in right]))
    assert 0 < core.statistics()["accepted_tokens"] < core.statistics()["drafted_tokens"]
    return found, {tuple(tokens): guesses for tokens, guesses in seen.drafts if guesses}


@pytest.mark.parametrize("kind", ["Eagle", "MTP"])
@pytest.mark.parametrize(
    ("on_gpus", "dtype", "equal"),
    [(False, "float32", 0.98), (True, "float32", 0.95), (True, "bfloat16", 0.7)],
    ids=["CPUs", "GPUs", "GPUs, bfloat16"],
)
def test_two_ranks_guess_as_one(tmp_path: Path, kind: str, on_gpus: bool, dtype: str, equal: float) -> None:
    """`equal`: the share of guesses that are the same ones, behind right and wrong ones, also in chunks."""
    world = MPI.COMM_WORLD
    if world.size != 2:
        pytest.skip("for two ranks")
    torch = pytest.importorskip("torch")
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = Path(world.bcast(str(tmp_path)))
    how = world.bcast(save(kind, folder) if world.rank == 0 else None)
    comms = InstanceComms(world.Dup(), world.Dup(), MPI.COMM_SELF.Dup())
    options: dict[str, Any] = {"max_seq_len": 200, "dtype": dtype, "max_num_tokens": 70, "end_ids": ()}
    if on_gpus:
        options |= {"gpu_bytes": 8 << 30, "gpu": 0}
    of_ranks = {**options, "model_path": str(folder), "speculative_config": how, "n_threads": 1}
    of_ranks |= {"tokens_per_block": 8, "enable_chunked_context": True}
    of_ranks |= {"gpu": world.rank} if on_gpus else {}
    core = TorchCore(CoreConfig("torch", engine_config(tp_size=2, tp_rank=world.rank, **of_ranks)), comms)
    core.load()
    if world.rank:
        follow(core, world)
        return
    try:
        check(core, folder, how, options, equal)
    finally:
        world.send(None, 1, STOP)


def check(core: TorchCore, folder: Path, how: dict[str, Any], options: dict[str, Any], equal: float) -> None:
    """Compare the leader's core with one that is alone."""
    from tests.helpers.gpu_cores import answer
    from tests.helpers.torch_cores import make_batch, make_core

    prompts = [np.random.default_rng(n).integers(0, 318, n).tolist() for n in (3, 5, 9, 20, 33, 47, 64, 90)]
    plain = answer(make_core(folder, **options), make_batch(prompts))
    right = {tuple(prompt): tokens for prompt, tokens in zip(prompts, plain, strict=True)}
    found, guessed = ask(core, right)
    assert core.compiled_in_test() == []
    alone, guessed_alone = ask(make_core(folder, speculative_config=how, **options), right)
    if options["dtype"] == "float32":
        assert sum(a == b == c for a, b, c in zip(found, alone, plain, strict=True)) >= 7  # near ties
    both = guessed.keys() & guessed_alone.keys()
    assert len(both) > 20
    assert sum(guessed[tokens] == guessed_alone[tokens] for tokens in both) >= equal * len(both)
