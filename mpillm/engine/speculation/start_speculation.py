"""Set up the speculation in --speculative_config."""

from __future__ import annotations

from dataclasses import replace

import torch

from mpillm.engine.kernels import ops
from mpillm.engine.kernels.cpu_kernels import cpu_kernels
from mpillm.engine.model.eagle_head import EagleHead
from mpillm.engine.model.model_part import ModelPart
from mpillm.engine.model.mtp_head import MtpHead
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.run.cpu_steps import CpuSteps
from mpillm.engine.run.gpu_steps import GpuSteps
from mpillm.engine.run.worker import Worker
from mpillm.engine.schedule.scheduler import Scheduler
from mpillm.engine.shape.eagle_config import EagleConfig
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import ModelInfo, model_info
from mpillm.engine.shape.mtp_config import MtpConfig
from mpillm.engine.shape.speculative_config import SpeculativeConfig, decode_rows, draft_config, max_rows
from mpillm.engine.speculation.draft_model import DraftModel
from mpillm.engine.speculation.eagle import EagleDrafter
from mpillm.engine.speculation.fixed_acceptance import FixedAcceptance
from mpillm.engine.speculation.ngram import NGramDrafter
from mpillm.engine.speculation.speculation import Drafter, Speculation
from mpillm.engine.weights.rank_weights import read_embedding


def start_speculation(config: EngineConfig, worker: Worker, scheduler: Scheduler) -> Speculation:
    """Load the draft model, if any, and return the speculation. `worker`: of the target model."""
    how, drafter = _how(config), start_drafter(config, worker)
    watch = drafter.computed if isinstance(drafter, EagleDrafter) else None
    limits = config.scheduler.max_num_tokens, how.max_draft_len, how.max_concurrency
    length = config.acceptance_length
    fixed = None if length is None else FixedAcceptance(length, worker.part.info.end_ids)
    return Speculation(drafter, scheduler, *limits, watch, fixed)


def _how(config: EngineConfig) -> SpeculativeConfig:
    return SpeculativeConfig.read(config.speculative_config or {})


def start_drafter(config: EngineConfig, worker: Worker) -> Drafter:
    """Return the drafter (see `start_speculation`)."""
    info = worker.part.info
    if info.head is not None:
        return _head_drafter(config, info.head, worker)
    if (draft := draft_config(config)) is None:
        return NGramDrafter(_how(config).max_matching_ngram_size)
    if config.gpu_bytes is not None:  # `info` reserves as many tokens for the draft cache as for the model's
        draft = replace(draft, kv_cache_tokens=info.kv_cache_tokens)
    worker = draft_worker(draft, replace(model_info(draft), window_cache_tokens=0))
    return DraftModel(worker, config.scheduler)


def draft_worker(config: EngineConfig, info: ModelInfo) -> Worker:
    """Return a warmed-up worker of the draft model. Both arguments are the draft model's."""
    if config.gpu_bytes is None:
        return Worker.on_cpu(config, info, Groups())
    n_decode_rows = DraftModel.decode_rows(config.scheduler)
    worker = Worker.on_gpu(config, info, Groups(), n_decode_rows=n_decode_rows)
    worker.warm_up(config.scheduler.max_num_tokens)
    return worker


def _head_drafter(config: EngineConfig, head: EagleConfig | MtpConfig, worker: Worker) -> EagleDrafter:
    """Load the head; its KV cache holds as many tokens as the model's."""
    part, model = worker.part, head.model
    features = part.model.features
    assert features is not None
    on_gpu = worker.steps if isinstance(worker.steps, GpuSteps) else None
    group = model.n_heads // model.n_kv_heads
    kernels = cpu_kernels(part.dtype, model.head_dim, group) if on_gpu is None else on_gpu.kernels
    with torch.inference_mode():
        embedding = part.model.embedding
        if part.groups.layout.tp_size > 1:  # each rank has a part of it, but the head needs all of it
            embedding = read_embedding(part.info, str(part.device), dummy=config.load_format == "dummy")
        of_model = embedding, part.info.max_seq_len, part.dtype, kernels or ops, max_rows(config)
        head_model = EagleHead(head, *of_model) if isinstance(head, EagleConfig) else MtpHead(head, *of_model)
    info = replace(part.info, config=model, kv_dtype=part.info.dtype, layout=RankLayout(), end_ids=())
    info = replace(info, head=None, window_cache_tokens=0)
    own = ModelPart(info, config.scheduler.tokens_per_block, Groups(), head_model, part.dtype)
    steps: CpuSteps | GpuSteps = CpuSteps(own, kernels)
    if on_gpu is not None:
        steps = GpuSteps(own, config.scheduler, kernels, decode_rows(config))
    max_draft_len = _how(config).max_draft_len
    drafter = EagleDrafter(Worker(own, steps), head_model, features, config.scheduler, max_draft_len)
    if on_gpu is not None:
        drafter.warm_up()
    return drafter
