"""Run steps on a rank of an instance: its own engine's, or those that the leader's engine sends.

What all devices share is here; `cpu_steps` and `gpu_steps` compute a step on theirs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mpillm.engine.extras.request_extras import RequestExtras
from mpillm.engine.extras.shared_adapters import ReceivedAdapters
from mpillm.engine.handoff.transfers import Transfers
from mpillm.engine.kernels import ops
from mpillm.engine.kernels.cpu_kernels import cpu_kernels
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.cpu_steps import CpuSteps
from mpillm.engine.run.gpu_steps import GpuSteps, use_gpu
from mpillm.engine.schedule.sequence import Progress
from mpillm.engine.schedule.step import Step
from mpillm.engine.schedule.transfer import Kind
from mpillm.engine.shape.dtypes import torch_dtype
from mpillm.engine.shape.memory import CHOSEN_AT_ONCE
from mpillm.engine.shape.model_info import ModelInfo
from mpillm.engine.tensors.sampler import likeliest, sample
from mpillm.engine.tensors.staging import SampledTokens, to_device
from mpillm.telemetry.recorder import Recorder


class Steps(Protocol):
    """How a device computes steps (`CpuSteps`, `GpuSteps`). It keeps each slot's state on the device."""

    n_ahead: int  # steps that may start before the previous step's tokens are read

    def forward(self, step: Step, layer_stored: Callable[[int], None] | None = None) -> Tensor:
        """Return the wanted rows for `Llama.logits`, or all for the next stage; see `Llama.forward`.

        All of a step that keeps context logits, too.
        """
        ...

    def feed(self, tokens: Tensor) -> None:
        """Take the tokens chosen from the last `forward`'s wanted rows: the next step may need them."""
        ...

    def warm_up(self, max_num_tokens: int, run: Callable[[Step], object]) -> None:
        """As `Worker.warm_up`; `run` is `Worker.run`."""
        ...


class Worker:
    """This rank's part of each step."""

    chosen_at_once = CHOSEN_AT_ONCE  # rows

    def __init__(self, part: ModelPart, steps: Steps) -> None:
        self.part = part
        self.steps = steps
        self.peers = part.peers
        self.transfers: Transfers | None = None  # if this rank sends or receives KV caches
        own_columns = part.groups.layout.vocabulary(part.info.config)
        # End tokens among this rank's columns of the logits, and among all.
        self._own_ends, self._ends = (
            torch.tensor(
                [id_ - columns.start for id_ in part.info.end_ids if columns.start <= id_ < columns.stop],
                dtype=torch.int64,
                device=part.device,
            )
            for columns in (own_columns, range(part.info.config.vocab_size))
        )

    @classmethod
    def on_cpu(cls, info: ModelInfo, tokens_per_block: int, groups: Groups, *, dummy: bool) -> Worker:
        """Load the weights, which takes minutes for a large model."""
        config, layout = info.config, groups.layout
        kv_heads = layout.kv_heads(config)
        group = layout.n_heads(config) // (kv_heads.stop - kv_heads.start)
        kernels = cpu_kernels(torch_dtype(info.dtype), config.head_dim, group)
        part = ModelPart.load(info, tokens_per_block, groups, dummy=dummy, ops=kernels or ops)
        return cls(part, CpuSteps(part, kernels))

    @classmethod
    def on_gpu(
        cls,
        info: ModelInfo,
        tokens_per_block: int,
        groups: Groups,
        max_batch_size: int,
        *,
        dummy: bool,
        device: str,
        kernels: Any = None,
        shares_rows: bool = False,
        decode_rows: int | None = None,
        fp8_contexts: bool = False,
    ) -> Worker:
        """Load the weights and capture the graphs, which takes seconds, or minutes for a large model.

        `device` may be a CPU with plain `kernels`, slowly and without graphs. With `shares_rows` a kernel,
        not NCCL, adds the rows of a TP group, if its GPUs reach each other's memory. `decode_rows`: those of
        a step of last tokens and guesses, at most; `max_batch_size` if nobody guesses. `fp8_contexts`: long
        ones are multiplied so (see `kernels.fp8_contexts`).
        """
        kernels = kernels or use_gpu(device)
        part = ModelPart.load(info, tokens_per_block, groups, dummy=dummy, device=device, ops=kernels)
        if shares_rows:
            groups.share_rows(info.config.hidden_size, part.dtype)
        return cls(part, GpuSteps(part, max_batch_size, kernels, decode_rows, fp8_contexts))

    @torch.inference_mode()
    def run(self, step: Step) -> SampledTokens | None:
        """Run a step. On the first rank of the last stage, return a token for each wanted row.

        With `Step.logprobs` 1 + k these are rows of 2 + 2k numbers: the token, its log probability, the k
        likeliest tokens and their log probabilities, as the bits of float32. Returns None on the other ranks,
        and for a step without tokens.
        """
        layer_stored = None
        if step.transfers:
            assert self.transfers is not None
            self.transfers.start(step.transfers)
            if any(transfer.kind == Kind.SEND_LAYERS for transfer in step.transfers):
                layer_stored = self.transfers.layer_stored
            if not step.spans:
                return None
        layout = self.part.groups.layout
        x = self.steps.forward(step, layer_stored)
        if not layout.is_last_stage:
            assert self.peers is not None
            self.peers.send_hidden(x)
            return None
        keeps_all = step.extra is not None and bool(step.extra.context_logits)
        if step.extra is not None and keeps_all:
            self._keep_logits(x, step.extra.context_logits)
        if not step.logits_rows:
            return None if layout.tp_rank else SampledTokens(torch.empty(0, dtype=torch.int64))
        if keeps_all:  # then these are all rows
            x = x.index_select(0, to_device(step.logits_rows, x.device))
        logits = self.part.model.logits(x)
        pieces = [self._chosen(logits[rows], of_rows) for rows, of_rows in step.choices(self.chosen_at_once)]
        chosen = [piece for piece in pieces if piece is not None]
        if not chosen:
            return None
        tokens, numbers = chosen[0] if len(chosen) == 1 else map(torch.cat, zip(*chosen, strict=True))
        self.steps.feed(tokens)
        return None if layout.tp_rank else SampledTokens(numbers)

    def logits(self, step: Step) -> Tensor:
        """Run a step as far as the logits: this rank's columns for each wanted row.

        For an instance of one stage, on all its ranks.
        """
        return self.part.model.logits(self.steps.forward(step))

    def warm_up(self, max_num_tokens: int) -> None:
        """Run every kind of step of up to `max_num_tokens` tokens, so that tests compile none. Collective."""
        self.steps.warm_up(max_num_tokens, self.run)

    def _keep_logits(self, x: Tensor, wanted: list[tuple[RequestExtras | None, slice]]) -> None:
        """Keep the logits of some rows, on the leader, whose host waits for them. Collective."""
        for special, rows in wanted:
            for start in range(rows.start, rows.stop, self.chosen_at_once):
                some = x[start : min(start + self.chosen_at_once, rows.stop)]
                whole = self._whole(self.part.model.logits(some))
                if special is not None and whole is not None:
                    special.context_logits.append(whole.cpu().numpy())

    def _chosen(self, logits: Tensor, step: Step) -> tuple[Tensor, Tensor] | None:
        """Return a token for each row, and what `run` returns of them (int64); or None, as `_choose`.

        Collective. `logits`: this rank's columns; may be changed.
        """
        own = self._whole(logits.clone()) if step.logprobs else None  # a copy, because `_choose` changes them
        if step.is_adjusted:
            whole = self._whole(logits)
            if whole is None:
                return None
            logits = _adjusted(whole, step)
        tokens = self._choose(logits, step)
        if tokens is None:
            return None
        return tokens, tokens if own is None else with_logprobs(tokens, own, step.logprobs - 1)

    def _choose(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return a token for each row (int64), or None.

        Only the ranks to which `Groups.gather` gives the whole get tokens. `logits`: this rank's columns, or
        all of an adjusted step; may be changed.
        """
        ends = self._ends if step.is_adjusted else self._own_ends
        groups, layout = self.part.groups, self.part.groups.layout
        if step.not_end and len(ends):
            rows = to_device(step.not_end, logits.device)
            # Assigning a number would wait for the device: PyTorch copies it there from the host.
            logits.index_put_((rows[:, None], ends), logits.new_full((), -torch.inf))
        if step.sampling is not None:
            whole = logits if step.is_adjusted else self._whole(logits)
            # A GPU's sums may differ in the last bits from rank to rank; the choice must not.
            return None if whole is None else groups.broadcast(sample(whole, step.sampling, step.places))
        if layout.tp_size == 1 or step.is_adjusted:
            return likeliest(logits)
        return self._best_of_all(*logits.max(-1))

    def _whole(self, logits: Tensor) -> Tensor | None:
        """Return the logits of the whole vocabulary (float32), or None, as `Groups.gather`."""
        groups = self.part.groups
        return groups.gather(logits.float(), groups.layout.vocabulary_sizes(self.part.info.config))

    def _best_of_all(self, best: Tensor, at: Tensor) -> Tensor | None:
        """Return each row's likeliest token, from each rank's likeliest; or None, as `Groups.gather`."""
        groups, layout = self.part.groups, self.part.groups.layout
        # float64 holds both exactly.
        own_columns = torch.stack([best.double(), (at + self.part.model.vocabulary.start).double()], dim=1)
        pairs = groups.gather(own_columns, [2] * layout.tp_size)
        if pairs is None:
            return None
        pairs = pairs.view(len(best), layout.tp_size, 2)
        return pairs[:, :, 1].gather(1, pairs[:, :, 0].argmax(1, keepdim=True))[:, 0].long()


def _adjusted(logits: Tensor, step: Step) -> Tensor:
    """Return what special requests choose from: [n, vocab] (float32), on the leader of an instance."""
    for row, sequence, beam in step.more().specials:
        special, output = sequence.special, sequence.output
        assert special is not None
        if special.beams is not None:
            output = special.beams.running[beam].tokens
        if special.keeps_generation_logits:
            special.generation_logits.append(logits[row].to("cpu", copy=True).numpy())
        may_end = len(output) >= sequence.min_output
        special.adjust(logits[row], sequence.prompt, output, may_end=may_end)
        if special.beams is not None:
            special.beams.take(logits[row].log_softmax(-1))
    return logits


def with_logprobs(tokens: Tensor, logits: Tensor, k: int) -> Tensor:
    """Return the rows that `Worker.run` describes, one after another: int64. `logits`: float32 [n, vocab]."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    numbers = torch.cat([logprobs.gather(1, tokens[:, None]), best.values], dim=1).view(torch.int32).long()
    return torch.cat([tokens[:, None], numbers[:, :1], best.indices, numbers[:, 1:]], dim=1).flatten()


class Follower:
    """A rank that does not lead: it runs the steps of the leader's `Engine` as soon as their input is here.

    Its sequences are the leader's, so it has no progress of its own to return.
    """

    def __init__(self, worker: Worker) -> None:
        assert worker.peers is not None
        self._worker = worker
        self._peers = worker.peers
        self._step: Step | None = None
        self._sampled: deque[SampledTokens] = deque()  # tokens that the leader waits for
        part = worker.part
        self._adapters = ReceivedAdapters(part.info.config, part.dtype, part.groups.layout)
        self.recorder: Recorder | None = None  # on a GPU, which computes on, it notes when steps are launched

    def has_work(self) -> bool:
        if self._sampled and self._sampled[0].ready():
            return True
        if self._step is None:
            self._step = self._peers.take_plan()
        return self._step is not None and self._can_run()

    def is_quiet(self) -> bool:
        """Return whether `has_work` stays False until a message comes, and no transfer is under way."""
        transfers = self._worker.transfers
        waits = self._step is None and not self._sampled and self._peers.is_quiet()
        return waits and (transfers is None or transfers.is_done())

    def step(self) -> list[Progress]:
        """Run the step, and send the tokens, that `has_work` found."""
        if self._step is not None and self._can_run():
            step, self._step = self._step, None
            self._adapters.find(step)
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
        """Tell the leader which transfers are done on this rank."""
        if self._worker.transfers is not None and (done := self._worker.transfers.poll()):
            self._peers.send_moved(done)
        return []

    def _can_run(self) -> bool:
        assert self._step is not None
        return self._peers.layout.is_first_stage or not self._step.spans or self._peers.has_hidden()
