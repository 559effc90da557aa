"""Requests with extras (`engine.extras`) get the same answers from two ranks of an engine as from one."""

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

PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9, 3], [8, 8, 8, 8], [5, 6, 7]]
N_OUTPUT = 9
BIAS = np.sin(np.arange(512)).astype(np.float32)


def ask(core: TorchCore, adapter: Any) -> tuple[list[list[int]], list[Any]]:
    """Return the answers to prompts with different extras, and the results that are in their extras."""
    from mpillm.engine.extras.request_extras import RequestExtras
    from tests.helpers.torch_cores import answer_with_extras

    extras_by_id = {
        0: RequestExtras(keeps_context_logits=True, keeps_generation_logits=True, adapter=adapter),
        1: RequestExtras(keeps_context_logits=True, beam_width=3, ends=(), length_penalty=1.0),
        2: RequestExtras(
            bad_words=((3, 250), (77,)), repetition_penalty=1.7, bias=np.arange(512, dtype=np.float32)
        ),
        3: RequestExtras(adapter=adapter, beam_width=2, ends=()),
    }
    answers = answer_with_extras(core, PROMPTS, extras_by_id, N_OUTPUT, min_output=[0, 0, 0, 0, 4])
    beams = [beam for i in (1, 3) if (search := extras_by_id[i].beams) for beam in search.answers()]
    left = [
        *extras_by_id[0].context_logits,
        *extras_by_id[0].generation_logits,
        *extras_by_id[1].context_logits,
    ]
    return [*answers, *(beam.tokens for beam in beams)], [*left, np.array([beam.sum for beam in beams])]


@pytest.mark.parametrize("on_gpus", [False, True], ids=["CPUs", "GPUs"])
def test_two_ranks_answer_as_one(tmp_path: Path, on_gpus: bool) -> None:
    """Logits, beams, penalties and adapters of one batch; an adapter that is forgotten goes everywhere."""
    world = MPI.COMM_WORLD
    if world.size != 2:
        pytest.skip("for two ranks")
    torch = pytest.importorskip("torch")
    if on_gpus and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    # Not before: they import PyTorch.
    from mpillm.triton.peft_adapter import convert
    from tests.helpers.adapters import make_adapter
    from tests.helpers.presets import save_preset
    from tests.helpers.torch_cores import answer_with_extras, make_core

    folder = Path(world.bcast(str(tmp_path)))
    if world.rank == 0:
        save_preset("tiny-llama", folder / "model")
        if not on_gpus:
            make_adapter(folder / "model", folder / "adapter", 1)
    world.Barrier()
    comms = InstanceComms(world.Dup(), world.Dup(), MPI.COMM_SELF.Dup())
    options: dict[str, Any] = {"model_path": str(folder / "model"), "max_seq_len": 256, "end_ids": (3,)}
    options |= {"tokens_per_block": 8, "enable_chunked_context": True, "max_num_tokens": 24, "n_threads": 1}
    on_one: dict[str, Any] = {}
    if on_gpus:
        on_one = {"gpu_bytes": 8 << 30, "gpu": 0}
        options |= on_one | {"gpu": world.rank}
    core = TorchCore(CoreConfig("torch", engine_config(tp_size=2, tp_rank=world.rank, **options)), comms)
    core.load()
    assert core.takes_extras and core.takes_adapters != on_gpus
    if world.rank:
        follow(core, world)
        assert core.worker is not None
        world.send(len(core.worker.extended.received_adapters), 0, STOP)
        return
    alone = make_core(folder / "model", end_ids=(3,), max_num_tokens=24, **on_one)
    adapter = adapter_alone = None
    if core.takes_adapters:
        weights, config = convert(folder / "adapter", "float32")
        adapter = core.make_adapter(weights[0], config[0])
        adapter_alone = alone.make_adapter(weights[0], config[0])
    answers, left = ask(core, adapter)
    expected, expected_left = ask(alone, adapter_alone)
    assert answers == expected
    for found, wanted in zip(left, expected_left, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    del adapter
    plain = answer_with_extras(core, PROMPTS[:1], {}, N_OUTPUT)
    assert plain == answer_with_extras(alone, PROMPTS[:1], {}, N_OUTPUT)
    assert (plain == answers[:1]) == on_gpus  # where nothing adapted it
    world.send(None, 1, STOP)
    assert world.recv(source=1, tag=STOP) == 0, "adapters that are kept"
