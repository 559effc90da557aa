"""The GPU's way of running steps, on a CPU, with plain kernels and tokens that come late."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.engine import Engine
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.step import Step
from mpillm.engine.tensors.staging import SampledTokens
from tests.helpers import plain_kernels
from tests.helpers.engine_configs import engine_config


class Late(SampledTokens):
    """Is ready at the fourth look, so that the engine goes on as far as it can before it reads."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__(tokens)
        self._looks = 0

    def ready(self) -> bool:
        self._looks += 1
        return self._looks > 3


class LateWorker(Worker):
    """Has the tokens of each step late."""

    def run(self, step: Step) -> SampledTokens | None:
        sampled = super().run(step)
        return sampled and Late(sampled._tokens)


class GpuCore(TorchCore):
    """Computes the steps of a GPU on a CPU."""

    worker_type: type[Worker] = Worker

    def _make_worker(self) -> Worker:
        return gpu_worker(self, self.worker_type)


class LateGpuCore(GpuCore):
    """Has the tokens of each step late, too."""

    worker_type = LateWorker


KINDS: dict[str, type[TorchCore]] = {"of a CPU": TorchCore, "of a GPU": LateGpuCore}


def gpu_worker(core: TorchCore, kind: type[Worker] = Worker, kernels: Any = plain_kernels) -> Worker:
    """Return a worker that computes on a CPU as on a GPU, with plain kernels."""
    return kind.on_gpu(core.config.engine, core.info, Groups(), kernels)


def make_engine(
    model: Path,
    kind: type[Worker] = LateWorker,
    on_gpu: bool = True,
    kernels: Any = plain_kernels,
    **options: Any,
) -> Engine:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {"tokens_per_block": 8, "end_ids": (), "max_seq_len": 256}
    core = TorchCore(CoreConfig("torch", engine_config(model, **defaults | options)))
    scheduler = dataclasses.replace(core.config.engine.scheduler, enable_chunked_context=True)
    worker = (
        gpu_worker(core, kind, kernels) if on_gpu else kind.on_cpu(core.config.engine, core.info, Groups())
    )
    return Engine(core.info, scheduler, worker)
