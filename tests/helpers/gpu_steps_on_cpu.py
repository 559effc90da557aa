"""The GPU's way of running steps, on a CPU, with plain kernels and tokens that come late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.engine import Engine
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run import worker as worker_module
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.engine_limits import EngineLimits
from mpillm.engine.shape.speculative_config import decode_rows
from mpillm.engine.tensors.staging import Sampled
from tests.helpers import plain_kernels


class Late(Sampled):
    """Is ready at the fourth look, so that the engine goes on as far as it can before it reads."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__(tokens)
        self._looks = 0

    def ready(self) -> bool:
        self._looks += 1
        return self._looks > 3


def compute_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all cores that a test makes compute so."""
    monkeypatch.setattr(TorchCore, "_make_worker", gpu_worker)
    monkeypatch.setattr(worker_module, "Sampled", Late)


def gpu_worker(core: TorchCore, kind: type[Worker] = Worker) -> Worker:
    """Take the place of `TorchCore._make_worker`."""
    config = core.config
    return kind.on_gpu(
        core.info,
        config.tokens_per_block,
        Groups(),
        config.max_batch_size,
        dummy=False,
        device="cpu",
        kernels=plain_kernels,
        decode_rows=decode_rows(config),
    )


def make_engine(model: Path, kind: type[Worker] = Worker, on_gpu: bool = True, **options: Any) -> Engine:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {"tokens_per_block": 8, "end_ids": (), "max_seq_len": 256}
    core = TorchCore(CoreConfig("torch", model_path=str(model), **(defaults | options)))
    config = core.config
    worker = gpu_worker(core, kind) if on_gpu else core._make_worker()
    return Engine(
        core.info, EngineLimits(config.max_batch_size, config.max_num_tokens, config.tokens_per_block), worker
    )
