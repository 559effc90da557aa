"""Make what --speculative_config asks for."""

from __future__ import annotations

from dataclasses import replace

from mpillm.config.core_config import CoreConfig
from mpillm.engine.model.model_info import ModelInfo, model_info
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.scheduler import Scheduler
from mpillm.engine.speculation.draft_model import DraftModel
from mpillm.engine.speculation.ngram import NGramDrafter
from mpillm.engine.speculation.speculation import Drafter, Speculation
from mpillm.engine.speculation.speculative_config import SpeculativeConfig, draft_config
from mpillm.engine.worker import Worker


def start_speculation(config: CoreConfig, info: ModelInfo, scheduler: Scheduler) -> Speculation:
    """Load the draft model, if there is one, which takes as long as any of its size. `info`: the model's."""
    how = SpeculativeConfig.read(config.speculative_config or {})
    drafter = start_drafter(config, info)
    return Speculation(drafter, scheduler, config.max_num_tokens, how.max_draft_len, how.max_concurrency)


def start_drafter(config: CoreConfig, info: ModelInfo) -> Drafter:
    """Return what guesses; as `start_speculation`."""
    if (beside := draft_config(config)) is None:
        how = SpeculativeConfig.read(config.speculative_config or {})
        return NGramDrafter(how.max_matching_ngram_size)
    if config.gpu_bytes is not None:  # `info` counts a token of its cache beside each of the model's
        beside = replace(beside, kv_cache_tokens=info.kv_cache_tokens)
    worker = draft_worker(beside, model_info(beside))
    return DraftModel(worker, config.tokens_per_block, config.max_batch_size, config.max_num_tokens)


def draft_worker(config: CoreConfig, info: ModelInfo) -> Worker:
    """Return a rank of the draft model, warmed up. Both arguments: the draft model's."""
    block, dummy = config.tokens_per_block, config.load_format == "dummy"
    if config.gpu_bytes is None:
        return Worker.on_cpu(info, block, Groups(), dummy=dummy)
    worker = Worker.on_gpu(
        info,
        block,
        Groups(),
        config.max_batch_size,
        dummy=dummy,
        device=f"cuda:{config.device or 0}",
        decode_rows=DraftModel.decode_rows(config.max_batch_size, config.max_num_tokens),
    )
    worker.warm_up(config.max_num_tokens)
    return worker
