"""Check of the speculation options before anything is loaded."""

from __future__ import annotations

from disagg.errors import ConfigError, about
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.model_info import ModelInfo, check_fit, model_info
from mpillm.engine.shape.speculative_config import (
    EAGLE,
    MTP,
    SpeculativeConfig,
    draft_config,
    read_speculation,
)


@about("speculative_config")
def check_speculation(config: EngineConfig, info: ModelInfo) -> None:
    """Raise ConfigError if this kind of speculation does not exist, or does not support the model."""
    _check_acceptance_length(config)
    if config.speculative_config:
        how = SpeculativeConfig.read(config.speculative_config)
        if how.decoding_type in (EAGLE, MTP):
            _check_head(config, how.decoding_type)
    if (draft := draft_config(config)) is not None:
        draft_info = model_info(draft)
        if config.gpu_bytes is None:  # on a GPU `model_info` counts both
            check_fit(draft, draft_info, other_bytes=check_fit(config, info))
        if draft_info.vocab_size != info.vocab_size:
            raise ConfigError(
                f"--speculative_config speculative_model {draft.model_path}: its vocabulary has"
                f" {draft_info.vocab_size} tokens, but {config.model_path} has {info.vocab_size}"
            )


@about("acceptance_length", "speculative_config")
def _check_acceptance_length(config: EngineConfig) -> None:
    """Raise ConfigError if an instance that generates cannot have the given acceptance length."""
    if (length := config.acceptance_length) is None or config.role == "context":
        return
    if (how := read_speculation(config)) is None:
        raise ConfigError(
            f"--acceptance_length {length:g}: there are no draft tokens to accept; set --speculative_config"
        )
    if length > how.max_draft_len + 1:
        raise ConfigError(
            f"--acceptance_length {length:g}: a step has at most {how.max_draft_len + 1} tokens, the draft"
            f" tokens of --speculative_config ({how.max_draft_len}) and one more"
        )


@about("speculative_config")
def _check_head(config: EngineConfig, kind: str) -> None:
    """Raise ConfigError if a head would not receive the hidden states of all tokens of a sequence."""
    for is_so, case in (
        (config.pp_size > 1, "in several pipeline stages, so far"),
        (config.role != "executor", "in disaggregated mode: a KV cache moves without them"),
        (
            config.scheduler.enable_kv_cache_reuse,
            "with --enable_kv_cache_reuse: reused blocks come without them",
        ),
    ):
        if is_so:
            raise ConfigError(
                f"--speculative_config decoding_type {kind}: the head reads the model's hidden states,"
                f" which it does not get {case}"
            )
