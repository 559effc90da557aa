"""Check, before anything is loaded, that an engine can guess as it is asked to."""

from __future__ import annotations

from dataclasses import replace

from disagg.errors import ConfigError, about
from mpillm.config.core_config import CoreConfig
from mpillm.engine.model.model_info import ModelInfo, check_model, model_info
from mpillm.engine.speculation.speculative_config import DRAFT_TARGET, NGRAM, SpeculativeConfig


@about("speculative_config")
def check_speculation(config: CoreConfig, info: ModelInfo) -> None:
    """Raise ConfigError if there is no such speculation, or none for this model here."""
    if not config.speculative_config:
        return
    how = SpeculativeConfig.read(config.speculative_config)
    if how.decoding_type == DRAFT_TARGET and config.gpu_bytes is not None:
        raise ConfigError(
            f"--speculative_config decoding_type {DRAFT_TARGET}: the torch core runs draft models on CPUs"
            f" only, so far; use --device cpu, or decoding_type {NGRAM}"
        )
    if how.decoding_type == DRAFT_TARGET and config.role != "context":
        draft = check_model(_draft_config(config, how))
        if draft.vocab_size != info.vocab_size:
            raise ConfigError(
                f"--speculative_config speculative_model {how.speculative_model}: its vocabulary has"
                f" {draft.vocab_size} tokens, that of {config.model_path} {info.vocab_size}"
            )


def draft_model_info(config: CoreConfig, how: SpeculativeConfig) -> ModelInfo:
    """As `model_info`, of the draft model, which is on one rank."""
    return model_info(_draft_config(config, how))


def _draft_config(config: CoreConfig, how: SpeculativeConfig) -> CoreConfig:
    return replace(
        config,
        role="executor",
        model_path=how.speculative_model,
        engine_dir=None,
        quantization="auto",
        kv_cache_dtype="auto",
        max_seq_len=None,
        end_ids=(),
        stop_words=(),
        speculative_config=None,
        tp_size=1,
        pp_size=1,
        ep_size=1,
        tp_rank=0,
        pp_rank=0,
        ep_rank=0,
        node_ranks=1,
    )
