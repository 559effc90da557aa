"""Check, before anything is loaded, that an engine can guess as it is asked to."""

from __future__ import annotations

from disagg.errors import ConfigError, about
from mpillm.config.core_config import CoreConfig
from mpillm.engine.model.model_info import ModelInfo, check_model
from mpillm.engine.speculation.speculative_config import SpeculativeConfig, draft_config


@about("speculative_config")
def check_speculation(config: CoreConfig, info: ModelInfo) -> None:
    """Raise ConfigError if there is no such speculation, or none for this model."""
    if config.speculative_config:
        SpeculativeConfig.read(config.speculative_config)
    if (beside := draft_config(config)) is not None:
        draft = check_model(beside)
        if draft.vocab_size != info.vocab_size:
            raise ConfigError(
                f"--speculative_config speculative_model {beside.model_path}: its vocabulary has"
                f" {draft.vocab_size} tokens, that of {config.model_path} {info.vocab_size}"
            )
