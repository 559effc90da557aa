"""Run steps on a rank of an instance: steps of its own engine, or steps that the root rank's engine sends.

This file contains the code for all devices. `cpu_steps` and `gpu_steps` compute a step on a device.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from mpillm.engine.extras.extended_run import ExtendedRun
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.kernels import ops
from mpillm.engine.kernels.cpu_kernels import cpu_kernels
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.step_parts import Steps
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.parallel.token_chooser import TokenChooser
from mpillm.engine.run.cpu_steps import CpuSteps
from mpillm.engine.run.gpu_steps import GpuSteps, use_gpu
from mpillm.engine.schedule.sequence import Progress
from mpillm.engine.schedule.step import Step
from mpillm.engine.schedule.transfer import Kind
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.engine_config import CUSTOM_ALL_REDUCE, FP8_CONTEXTS, EngineConfig
from mpillm.engine.shape.layout import length
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.shape.speculative_config import decode_rows
from mpillm.engine.tensors.staging import SampledTokens
from mpillm.telemetry.recorder import Recorder


class Worker:
    """This rank's part of each step."""

    def __init__(self, part: ModelPart, steps: Steps) -> None:
        self.part = part
        self.steps = steps
        self.peers = part.peers
        self.transfers: Transfers | None = None  # if this rank sends or receives KV caches
        self.chooser = TokenChooser(part.info, part.groups, part.device)
        self.extended = ExtendedRun(part, steps, self.chooser)

    @classmethod
    def on_cpu(cls, config: EngineConfig, info: ModelInfo, groups: Groups) -> Worker:
        """Load the weights, which takes minutes for a large model."""
        model, layout = info.config, groups.layout
        group = layout.n_heads(model) // length(layout.kv_heads(model))
        kernels = cpu_kernels(torch_dtype(info.dtype), model.head_dim, group)
        part = ModelPart.load(config, info, groups, ops=kernels or ops)
        return cls(part, CpuSteps(part, kernels))

    @classmethod
    def on_gpu(
        cls,
        config: EngineConfig,
        info: ModelInfo,
        groups: Groups,
        kernels: Any = None,
        n_decode_rows: int | None = None,
    ) -> Worker:
        """Load the weights and capture the graphs, which takes seconds, or minutes for a large model.

        Args:
            kernels: Plain ones, which run on a CPU, slowly and without graphs; None: the GPU's.
            n_decode_rows: Rows of the largest step without contexts; None: `decode_rows`.
        """
        device = f"cuda:{config.gpu or 0}" if kernels is None else "cpu"
        kernels = kernels or use_gpu(device)
        part = ModelPart.load(config, info, groups, device=device, ops=kernels)
        if config.core_options.get(CUSTOM_ALL_REDUCE, True):
            groups.share_rows(info.config.hidden_size, part.dtype)
        fp8_contexts = config.core_options.get(FP8_CONTEXTS, False)
        steps = GpuSteps(part, config.scheduler, kernels, n_decode_rows or decode_rows(config), fp8_contexts)
        return cls(part, steps)

    @torch.inference_mode()
    def run(self, step: Step) -> SampledTokens | None:
        """Run a step. On the first rank of the last stage, return a token for each of `Step.logits_rows`.

        With `Step.logprobs` 1 + k, return rows of 2 + 2k numbers: the token, its log probability, the k
        likeliest tokens and their log probabilities. Log probabilities are the bits of float32. Returns None
        on the other ranks, and for a step without spans.
        """
        layer_stored = None
        if step.copies:
            self._copy_blocks(step)
        if step.transfers:
            assert self.transfers is not None
            self.transfers.start(step.transfers)
            if any(transfer.kind == Kind.SEND_LAYERS for transfer in step.transfers):
                layer_stored = self.transfers.layer_stored
            if not step.spans:
                return None
        if step.extras is not None:
            return self.extended.run(step, layer_stored)
        layout = self.part.groups.layout
        x = self.steps.forward(step, layer_stored)
        if not layout.is_last_stage:
            assert self.peers is not None
            self.peers.send_hidden(x)
            return None
        if not step.logits_rows:
            return None if layout.tp_rank else SampledTokens(torch.empty(0, dtype=torch.int64))
        chosen = self.chooser.choose(self.part.model.logits(x), step)
        if chosen is None:
            return None
        tokens, numbers = chosen
        self.steps.feed(tokens)
        return None if layout.tp_rank else SampledTokens(numbers)

    def _copy_blocks(self, step: Step) -> None:
        assert self.part.host_cache is not None
        self.part.host_cache.copy(step.copies)
        if self.part.cache.keys.is_cuda and any(one.kind == Kind.RECEIVE for one in step.transfers):
            # Another GPU may write to a received cache's blocks at any time. Their content is saved first.
            torch.cuda.current_stream().synchronize()

    def logits(self, step: Step) -> Tensor:
        """Run a step up to the logits: this rank's columns for each of `Step.logits_rows`.

        Collective. Requires an instance of one stage.
        """
        return self.part.model.logits(self.steps.forward(step))

    def warm_up(self, max_num_tokens: int) -> None:
        """Run every kind of step up to `max_num_tokens` tokens, so that tests compile nothing. Collective."""
        self.steps.warm_up(max_num_tokens, self.run)


class Follower:
    """Runs the root rank's steps on another rank, each as soon as its input has arrived.

    The root rank has the sequences, so this rank returns no progress.
    """

    def __init__(self, worker: Worker) -> None:
        assert worker.peers is not None
        self._worker = worker
        self._peers = worker.peers
        self._step: Step | None = None
        self._sampled: deque[SampledTokens] = deque()  # tokens that the root rank waits for
        self.recorder: Recorder | None = None  # on a GPU, it records the launches of steps

    def has_work(self) -> bool:
        if self._sampled and self._sampled[0].ready():
            return True
        if self._step is None:
            self._step = self._peers.take_plan()
        return self._step is not None and self._can_run()

    def is_quiet(self) -> bool:
        """Return whether `has_work` stays False until a message arrives, and no transfer is active."""
        transfers = self._worker.transfers
        waits = self._step is None and not self._sampled and self._peers.is_quiet()
        return waits and (transfers is None or transfers.is_done())

    def step(self) -> list[Progress]:
        """Run the step that has arrived, and send tokens that are ready."""
        if self._step is not None and self._can_run():
            step, self._step = self._step, None
            started = time.perf_counter()
            if (sampled := self._worker.run(step)) is not None:
                self._sampled.append(sampled)
            if self.recorder is not None and step.spans:
                contexts = [span.n_new for span in step.spans if not span.decodes]
                n_generating = len(step.spans) - len(contexts)
                self.recorder.step(started, time.perf_counter(), len(contexts), n_generating, sum(contexts))
        while self._sampled and self._sampled[0].ready():
            self._peers.send_tokens(self._sampled.popleft().take())
        return []

    def poll_kv(self) -> list[int]:
        """Report to the root rank the transfers that are done on this rank."""
        if self._worker.transfers is not None and (done := self._worker.transfers.poll()):
            self._peers.send_moved(done)
        return []

    def _can_run(self) -> bool:
        assert self._step is not None
        return self._peers.layout.is_first_stage or not self._step.spans or self._peers.has_hidden()
