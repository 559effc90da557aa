"""Make what --speculative_config asks for."""

from __future__ import annotations

from mpillm.config.core_config import CoreConfig
from mpillm.engine.parallel.groups import Groups
from mpillm.engine.scheduler import Scheduler
from mpillm.engine.speculation.draft_model import DraftModel
from mpillm.engine.speculation.draft_model_info import draft_model_info
from mpillm.engine.speculation.ngram import NGramDrafter
from mpillm.engine.speculation.speculation import Drafter, Speculation
from mpillm.engine.speculation.speculative_config import DRAFT_TARGET, SpeculativeConfig
from mpillm.engine.worker import Worker


def start_speculation(config: CoreConfig, scheduler: Scheduler) -> Speculation:
    """Load the draft model, if there is one, which takes as long as any of its size."""
    how = SpeculativeConfig.read(config.speculative_config or {})
    drafter: Drafter = NGramDrafter(how.max_matching_ngram_size)
    if how.decoding_type == DRAFT_TARGET:
        info, dummy = draft_model_info(config, how), config.load_format == "dummy"
        worker = Worker.on_cpu(info, config.tokens_per_block, Groups(), dummy=dummy)
        drafter = DraftModel(worker, config.tokens_per_block, config.max_batch_size, config.max_num_tokens)
    return Speculation(drafter, scheduler, config.max_num_tokens, how.max_draft_len, how.max_concurrency)
